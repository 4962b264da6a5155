"""Choosing an executor by trying both."""

import json
import time

import pytest
from torch import nn

import raypfl
from raypfl.federation import trial
from raypfl.federation.events import RunStarted
from raypfl.models import FlatModel
from raypfl.settings import TrainingSettings
from tests.runs import experiment

SHAPE = (1, 2, 2)


class Slow(nn.Linear):
    """Takes its time, once a call."""

    def forward(self, x):
        time.sleep(0.003)
        return super().forward(x.flatten(1))


class Peeking(nn.Linear):
    """Looks at a number, which cannot be done for all clients at once."""

    def forward(self, x):
        return super().forward(x.flatten(1)) * (2.0 if self.bias.sum().item() > 0 else 1.0)


def tried(network, folder, group=8, **training):
    return trial.faster(FlatModel(lambda: network(4, 3)), TrainingSettings(**training), SHAPE, 3, group, folder)


def test_clients_train_together_if_that_is_faster(tmp_path):
    found = tried(Slow, tmp_path)
    assert found.executor == "vectorised" and found.seconds["vectorised"] < found.seconds["sequential"] / 4
    assert "ms a client's step" in found.why


def test_clients_of_a_network_that_cannot_be_run_together_train_one_by_one(tmp_path, monkeypatch):
    assert tried(Peeking, tmp_path) == trial.Trial("sequential", {})
    monkeypatch.setattr(trial, "LARGEST", 20)  # a group of two would have 30 numbers
    assert tried(Slow, tmp_path) == trial.Trial("sequential", {})


def test_a_machine_tries_the_same_network_once(tmp_path, monkeypatch):
    first = tried(Slow, tmp_path)
    monkeypatch.setattr(trial, "_try", None)
    assert tried(Slow, tmp_path) == first
    with pytest.raises(TypeError):
        tried(Slow, tmp_path, batch_size=7)


def test_of_processes_that_try_at_the_same_time_the_first_one_decides(tmp_path, monkeypatch):
    other = trial.Trial("sequential", {"sequential": 1.0, "vectorised": 2.0})

    def meanwhile(*_):
        monkeypatch.setattr(trial, "_try", lambda *_: other)
        assert tried(Slow, tmp_path) == other
        return trial.Trial("vectorised", {"sequential": 2.0, "vectorised": 1.0})

    monkeypatch.setattr(trial, "_try", meanwhile)
    assert tried(Slow, tmp_path) == other


def test_a_run_says_what_was_chosen_and_a_resume_keeps_it(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYPFL_CACHE", str(tmp_path / "cache"))
    events = []
    done = raypfl.run(experiment(tmp_path, rounds=1), listeners=[events.append])
    facts = next(e.facts for e in events if isinstance(e, RunStarted))
    assert facts["executor"] == done.experiment.engine.executor != "auto" and "ms a client's step" in facts["why"]
    (found,) = (tmp_path / "cache" / "executors").glob("*.json")
    opposite = "sequential" if facts["executor"] == "vectorised" else "vectorised"
    found.write_text(json.dumps(json.loads(found.read_text()) | {"executor": opposite}))
    longer = raypfl.resume(done.run_dir, overrides=["rounds=2"])
    assert longer.experiment.engine.executor == facts["executor"]
