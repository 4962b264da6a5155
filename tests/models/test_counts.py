"""Methods train and send as many parameters of a ResNet-18 as PerAda's Table 1 prints (docs/methods.md)."""

from __future__ import annotations

import copy
from functools import cache, partial

import pytest
import torch
from torch import Tensor, nn

from raypfl.learning.executor import Executor
from raypfl.learning.settings import TrainingSettings
from raypfl.methods import METHODS, Method, PartialPersonalization
from raypfl.models import MODELS
from tests.support.federation import Federation, sent_per_client

ONE_STEP = TrainingSettings(steps=1, batch_size=4)


class Strides(Executor):
    """Train without computing: the n-th call moves every trained parameter by n, so that no two models agree."""

    strides = 0

    def sgd(self, training, observe=None):
        self.strides += 1
        trained = training.start.clone()
        is_trained = 1 if training.update.trained is None else training.update.trained
        trained[:, : self.model.num_parameters] += self.strides * is_trained
        return trained, trained.new_zeros(len(trained))

    def grad(self, loss, at, batches, keys, extras, update=None):
        self.strides += 1
        slope = torch.full_like(at[:, : self.model.num_parameters], self.strides)
        return slope, at.new_zeros(len(at)), self.model.buffers(at)


@cache
def initial_network(adapters: str) -> nn.Module:
    return MODELS.get("resnet18")(input_shape=(3, 32, 32), num_classes=10, adapters=adapters)


def federation(method: Method, adapters: str = "none") -> Federation:
    """Return a federation whose clients move each trained parameter once, by `Strides`."""
    factory = partial(copy.deepcopy, initial_network(adapters))  # drawing it anew takes ten times as long
    fed = Federation(factory, training=ONE_STEP, method=method)
    fed.context.executor = Strides(fed.model)
    return fed


def trained_by_client_0(fed: Federation) -> int:
    """Count the parameters that moved in what the client keeps and what it sent; a model in both counts once."""
    start = fed.context.initial
    models = []
    personal = fed.method.parts(fed.model).personal if isinstance(fed.method, PartialPersonalization) else slice(None)
    for array in fed.state_of(0).values():
        if array.size > 1:
            models.append(start.clone())
            models[-1][personal] = torch.from_numpy(array)

    models += [value for value in fed.server.values() if isinstance(value, Tensor) and value.shape == start.shape]
    moved = [fed.model.parameters(model - start) for model in models]
    distinct: list[Tensor] = []
    for model in moved:
        if not any((model - other).abs().max() <= 1e-4 for other in distinct):
            distinct.append(model)
    return sum(int((model.abs() > 1e-4).sum()) for model in distinct)


def millions(count: int) -> tuple[str, str, str]:
    """Return the ways in which a paper may print a count: rounded, truncated, or with one more digit."""
    return f"{count / 1e6:.2f}", f"{count // 10_000 / 100:.2f}", f"{count / 1e6:.3f}"


PUBLISHED = [
    ("local", {}, "none", "11.18", "0.00"),
    ("fedsim", {"personal": "adapters"}, "bias", "12.59", "11.18"),
]
PUBLISHED_FOR_OTHERS = [
    ("pfedme", {}, "none", "22.36", "11.18"),
    ("fedalt", {}, "none", "11.18", "11.17"),
    ("mtl", {}, "none", "11.18", "11.18"),
    ("fedavg-ft", {}, "none", "11.18", "11.18"),
    ("apfl", {"adaptive": False}, "none", "22.36", "11.18"),
    ("ditto", {}, "none", "22.36", "11.18"),
    ("fedbn", {}, "none", "11.18", "11.17"),
    ("fedalt", {"personal": "*conv1.weight"}, "none", "11.18", "6.45"),
    ("fedsim", {"personal": "*conv1.weight"}, "none", "11.18", "6.45"),
    ("lg-fedavg", {}, "none", "11.18", "0.005"),
    ("fedrep", {"personal_epochs": None}, "none", "11.18", "11.17"),
    ("fedsim", {}, "none", "11.18", "11.17"),
    ("fedalt", {"personal": "adapters"}, "bias", "12.59", "11.18"),
]


@pytest.mark.parametrize(
    ("name", "options", "adapters", "trained", "sent"),
    [*PUBLISHED, *[pytest.param(*row, marks=pytest.mark.thorough) for row in PUBLISHED_FOR_OTHERS]],
)
def test_parameters_trained_and_sent_are_the_published_counts(name, options, adapters, trained, sent):
    method = METHODS.get(name)(**options)
    fed = federation(method, adapters)
    fed.run_rounds([0])
    model = fed.model
    shared = torch.ones(model.size, dtype=torch.bool)
    if isinstance(method, PartialPersonalization):
        shared = method.parts(model).shared
    counted = {d: n for (d, _), n in sent_per_client(fed.ledger, 0).items()} or {"down": 0, "up": 0}
    statistics = int(model.buffers(shared).sum()) if name != "local" else 0  # the table counts parameters alone

    assert counted["up"] == counted["down"]
    assert trained in millions(trained_by_client_0(fed)) and sent in millions(counted["up"] - statistics)


@pytest.mark.parametrize(
    ("name", "count"), [("lg-fedavg", 5_130), ("fedrep", 11_176_512), ("fedbn", 11_172_042), ("fedbabu", 11_176_512)]
)
def test_a_preset_shares_this_many_parameters(name, count):
    method = METHODS.get(name)()
    model = federation(method).model
    assert int(model.parameters(method.parts(model).shared).sum()) == count
