"""Networks that work in one memory layout only, and networks with outputs that the usual loss refuses."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace

import numpy as np
import pytest
from torch import nn

import raypfl
from raypfl.common.errors import ConfigError
from raypfl.data.datasets import RawData
from raypfl.engine.events import RunStarted, Warned
from raypfl.methods import FedAvg
from raypfl.results.display.run_line import RunLine
from tests.support.federation import FP64, Federation, assert_close, both_executors
from tests.support.runs import experiment


class Reshaping(nn.Module):
    """A convolution and a head, for images in any layout."""

    def __init__(self, input_shape=(2, 4, 4), num_classes=3):
        super().__init__()
        channels, height, width = input_shape
        self.conv = nn.Conv2d(channels, 4, 3, padding=1)
        self.head = nn.Linear(4 * height * width, num_classes)

    def forward(self, x):
        return self.head(self.conv(x).flatten(1))


class Viewing(Reshaping):
    """A network that flattens by `view`, as in many tutorials; this fails channels last."""

    def forward(self, x):
        x = self.conv(x)
        return self.head(x.view(len(x), -1))


class Helped(Reshaping):
    """A network with a second output in training."""

    def forward(self, x):
        return (super().forward(x), x.flatten(1)) if self.training else super().forward(x)


class Mistaken(Reshaping):
    """A network with a mistake in its forward, on purpose."""

    def forward(self, x):
        return self.tail(x)


class TrainsHelped(FedAvg):
    """FedAvg with a loss for networks with a second output."""

    def train(self, clients, theta):
        def loss(p, batch):
            return clients.objective.loss(clients.model(p, batch.x)[0], batch)

        return {"theta": raypfl.Mean(clients.sgd(loss, theta))}


def coloured(config) -> RawData:
    """Return 200 colour images of three classes."""
    draws = np.random.default_rng(0)
    inputs = draws.integers(0, 60, (200, 3, 4, 4), dtype=np.uint8)
    labels = draws.integers(0, 3, 200)
    inputs[np.arange(200), labels] += 150
    return RawData(inputs, labels, ["red", "green", "blue"])


def described(tmp_path, network: type[nn.Module], method: str = "fedavg", **changes) -> raypfl.Experiment:
    always = {"data__name": f"{__name__}:coloured", "rounds": 1, "method": method, "partition__clients": 4}
    few = {"cohort__size": 4, "data__cache": tmp_path / "cache"}
    return experiment(tmp_path, **(always | few | changes)).replace(model=f"{__name__}:{network.__name__}")


def test_a_network_that_flattens_by_view_runs_by_default_and_the_run_says_why_it_is_not_channels_last(tmp_path):
    events = []
    result = raypfl.run(described(tmp_path, Viewing), listeners=[events.append])
    reason = "sequential, channels last does not work with this network: view size is not compatible"
    assert result.metadata["channels_last"] is False and reason in result.metadata["why"]
    assert not [e for e in events if isinstance(e, Warned)]
    line = RunLine("fedavg")
    line(next(e for e in events if isinstance(e, RunStarted)))
    assert reason in line.overview and f"{result.metadata['executor']} in groups of" in line.overview


@pytest.mark.parametrize("executor", ["auto", "sequential"])
def test_channels_last_for_a_network_that_cannot_is_refused_before_the_run(tmp_path, executor):
    sentence = (
        r"training\.channels_last is true, but the network \(Viewing\) does not work on images in that layout: "
        r"RuntimeError: view size is not compatible.*flatten\(1\).* or leave training\.channels_last out\."
    )
    laid = {"training__channels_last": "true", "engine__executor": executor}

    with pytest.raises(ConfigError, match=sentence):
        raypfl.run(described(tmp_path, Viewing, **laid))
    result = raypfl.run(described(tmp_path, Reshaping, **laid))
    assert result.metadata["channels_last"] is True


def test_a_network_whose_outputs_the_usual_loss_refuses_trains_sequentially_and_the_run_says_so(tmp_path):
    result = raypfl.run(described(tmp_path, Helped, f"{__name__}:TrainsHelped"))
    assert (result.metadata["executor"], result.metadata["channels_last"]) == ("sequential", False)
    why = "not tried, since clients.loss failed: AttributeError: 'tuple' object"
    assert result.metadata["why"].startswith(why)


def test_a_mistake_in_a_network_is_reported_unchanged_under_any_settings(tmp_path):
    settled = [{"engine__executor": "sequential", "training__channels_last": layout} for layout in ("true", "false")]
    for changes in ({}, *settled):
        with pytest.raises(ConfigError, match="AttributeError: 'Mistaken' object has no attribute 'tail'"):
            raypfl.run(described(tmp_path, Mistaken, **changes))


@pytest.mark.parametrize("work", ["sgd", "grad", "map"])
def test_a_function_that_does_not_work_channels_last_runs_without_and_warns(work):
    trained = []
    for laid in (False, True):
        clients = Federation(Reshaping, executor="sequential", training=replace(FP64, channels_last=laid)).clients()

        def looks_at_rows(p, batch, clients=clients):
            return clients.loss(p, batch) + p.sum() * batch.mean(batch.x.view(len(batch.x), -1).mean(1))

        if laid:
            reason = "does not work on channels-last images, so they keep their layout. torch says: view size"
            with pytest.warns(UserWarning, match=re.escape(reason)):
                trained.append(getattr(clients, work)(looks_at_rows, clients.initial))
        else:
            trained.append(getattr(clients, work)(looks_at_rows, clients.initial))

    assert_close(*trained)


def test_a_network_that_does_not_work_channels_last_is_evaluated_without_it():
    plain, laid = (
        Federation(Viewing, executor="sequential", training=replace(FP64, channels_last=last)).clients()
        for last in (False, True)
    )
    x, _ = Federation().samples(0)
    with pytest.warns(UserWarning, match="does not work on channels-last images"):
        assert_close(laid.logits(laid.initial, x), plain.logits(plain.initial, x))


@both_executors
def test_a_functions_own_error_is_not_blamed_on_how_it_runs(executor):
    clients = Federation(Reshaping, executor=executor, training=replace(FP64, channels_last=True)).clients()

    def failing(p, batch):
        raise RuntimeError("no view of mine")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match="no view of mine"):
            clients.sgd(failing, clients.initial)
