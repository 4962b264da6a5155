"""What methods train and send of a ResNet-18 is what PerAda's Table 1 prints, in millions (docs/methods.md)."""

from __future__ import annotations

import copy
from functools import cache, partial

import pytest
import torch
from torch import nn

from raypfl.methods import METHODS, Method, PartialPersonalization
from raypfl.models import MODELS
from raypfl.settings import TrainingSettings
from tests.support import Federation

NO_STEP = TrainingSettings(steps=0)
MODELS_TRAINED = {"local": 1, "mtl": 1, "fedavg-ft": 1, "fedavg": 1, "ditto": 2, "apfl": 2, "pfedme": 2}


@cache
def drawn(adapters: str) -> nn.Module:
    return MODELS.get("resnet18")(input_shape=(3, 32, 32), num_classes=10, adapters=adapters)


def federation(method: Method, adapters: str = "none") -> Federation:
    """Its clients do not train a step, so that what they send is all that is left of a round."""
    factory = partial(copy.deepcopy, drawn(adapters))  # drawing it anew takes ten times as long
    return Federation(factory, executor="sequential", training=NO_STEP, method=method)


def millions(count: int) -> tuple[str, str, str]:
    """A count as it may be printed: rounded, truncated, or with another digit if it is small."""
    return f"{count / 1e6:.2f}", f"{count // 10_000 / 100:.2f}", f"{count / 1e6:.3f}"


@pytest.mark.parametrize(
    ("name", "options", "adapters", "trained", "sent"),
    [
        ("local", {}, "none", "11.18", "0.00"),
        ("mtl", {}, "none", "11.18", "11.18"),
        ("fedavg-ft", {}, "none", "11.18", "11.18"),
        ("pfedme", {}, "none", "22.36", "11.18"),
        ("apfl", {"adaptive": False}, "none", "22.36", "11.18"),
        ("ditto", {}, "none", "22.36", "11.18"),
        ("fedbn", {}, "none", "11.18", "11.17"),
        ("fedalt", {"personal": "*conv1.weight"}, "none", "11.18", "6.45"),
        ("lg-fedavg", {}, "none", "11.18", "0.005"),
        ("fedrep", {"personal_epochs": None}, "none", "11.18", "11.17"),
        ("fedsim", {}, "none", "11.18", "11.17"),
        ("fedalt", {"personal": "adapters"}, "bias", "12.59", "11.18"),
    ],
)
def test_parameters_trained_and_sent_are_the_published_counts(name, options, adapters, trained, sent):
    method = METHODS.get(name)(**options)
    fed = federation(method, adapters)
    fed.play([0])
    model = fed.model
    shared = torch.ones(model.size, dtype=torch.bool)
    learning = MODELS_TRAINED.get(name, 1) * model.num_parameters
    if isinstance(method, PartialPersonalization):
        shared = method.parts(model).shared
        learning = int(model.parameters(~method.parts(model).frozen).sum())
    counted = {d: n for (d, _), n in fed.ledger.per_client(0).items()} or {"down": 0, "up": 0}
    statistics = int(model.buffers(shared).sum()) if name != "local" else 0  # the table counts parameters alone
    assert counted["up"] == counted["down"]
    assert trained in millions(learning) and sent in millions(counted["up"] - statistics)


@pytest.mark.parametrize(
    ("name", "count"), [("lg-fedavg", 5_130), ("fedrep", 11_176_512), ("fedbn", 11_172_042), ("fedbabu", 11_176_512)]
)
def test_the_shared_parameters_of_a_preset_are(name, count):
    method = METHODS.get(name)()
    model = federation(method).model
    assert int(model.parameters(method.parts(model).shared).sum()) == count
