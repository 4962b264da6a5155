"""Networks whose outputs do not fit the targets."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import raypfl
from raypfl import Experiment, Predictor
from raypfl.clients.clients import Clients
from raypfl.common.errors import ConfigError, RaypflError
from raypfl.data.datasets import DataConfig, RawData
from raypfl.federation.method import ServerView
from raypfl.methods.personal_models.ditto import Ditto
from raypfl.runs import driver
from raypfl.runs.choices.pretraining import pretrain
from tests.support.runs import experiment


def targets(config: DataConfig, kind: str) -> RawData:
    """Return 80 samples with a number or three labels each, or sequences of five tokens out of four."""
    draws = np.random.default_rng(0)
    targets_of = {
        "numbers": lambda: draws.normal(size=80),
        "labels": lambda: draws.integers(0, 2, (80, 3), dtype=np.int8),
        "tokens": lambda: draws.integers(0, 4, (80, 5)),
    }
    y = targets_of[kind]()
    inputs = y if kind == "tokens" else draws.normal(size=(80, 5))

    return RawData(inputs, y, ["height"] if kind == "numbers" else list("abcd"[: 3 if kind == "labels" else 4]))


class Sized(torch.nn.Module):
    """A network with `outputs` outputs, whatever the data; if negative, in a tuple."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, outputs: int):
        super().__init__()
        self.outputs = outputs
        self.head = torch.nn.Linear(math.prod(input_shape), abs(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor]:
        y = self.head(x.flatten(1).float())
        return (y,) if self.outputs < 0 else y


class Surveyed(Ditto):
    """A method without a global model, which predicts by the first of the network's outputs."""

    def personal_model(self, clients: Clients, server: ServerView) -> Predictor:
        theta = super().personal_model(clients, server)
        return Predictor(lambda x, theta: clients.model(theta, x)[:, :1], theta=theta)

    def global_model(self, server: object) -> None:
        return None


class Softmax(Sized):
    """A network that ends in a softmax."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).softmax(-1)


def described(kind: str, outputs: int, **changes) -> Experiment:
    data = "digits" if kind == "classes" else {"name": f"{__name__}:targets", "kind": kind}
    model = {"name": f"{__name__}:Sized", "outputs": outputs}
    return Experiment(data=data, model=model, partition={"name": "iid", "clients": 4}, **changes)


@pytest.mark.parametrize(
    ("kind", "outputs", "message"),
    [
        ("classes", 4, r"^model is .*Sized', which does not fit 'digits': .* shape \(4,\) .*\(classes: 10\).*, 10\.$"),
        ("classes", -10, "returns a tuple"),
        ("numbers", 2, r"shape \(2,\) for a sample, .*\(numbers: 1\).*, 1\.$"),
        ("labels", 1, r"shape \(1,\) for a sample, .*\(labels: 3\).*, 3\.$"),
        ("tokens", 4, r"shape \(4,\) for a sample, .*\(tokens: 4\)"),
    ],
)
def test_a_network_whose_outputs_cannot_be_evaluated_is_refused_unless_the_method_may_predict_otherwise(
    kind: str, outputs: int, message: str
):
    with pytest.raises(ConfigError, match=message):
        driver.check([described(kind, outputs)])
    driver.check([described(kind, outputs, method=Surveyed())])


@pytest.mark.parametrize("kind_outputs", [("classes", 12), ("numbers", 1), ("labels", 3)])
def test_outputs_that_suit_the_targets_are_accepted(kind_outputs: tuple[str, int]):
    driver.check([described(*kind_outputs)])


def test_a_network_that_ends_in_a_softmax_is_told_that_the_loss_has_one():
    model = {"name": f"{__name__}:Softmax", "outputs": 10}
    with pytest.warns(UserWarning, match="Softmax' are probabilities: .* Leave its softmax out"):
        driver.check([described("classes", 10).replace(model=model)])


def test_a_network_is_not_pretrained_on_outputs_that_do_not_suit_the_targets():
    changes = ["data.pools={auxiliary: 0.3}", "model.pretrain=auxiliary"]
    with pytest.raises(ConfigError, match=r"does not fit 'digits': .* shape \(4,\)"):
        pretrain(described("classes", 4).override(changes), lambda event: None)


def test_a_loss_that_cannot_take_the_networks_outputs_says_so_once(tmp_path):
    model = f"{{name: '{__name__}:Sized', outputs: 4}}"
    with pytest.raises(RaypflError) as caught:
        raypfl.run(experiment(tmp_path, method="local", model=model))
    text = str(caught.value)
    assert "clients.loss does not take this network's outputs: it returns outputs of shape (4,)" in text
    assert "in a row" not in text and "Traceback" not in text
