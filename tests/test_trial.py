"""Choosing an executor by trying both."""

import time

import pytest
import torch
from torch import nn

import raypfl
from raypfl.federation import trial
from raypfl.federation.events import RunStarted
from raypfl.federation.trial import Way
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


class SlowTogether(nn.Linear):
    """Takes its time if it is run for several clients at once."""

    def forward(self, x):
        time.sleep(0.05 * torch._C._functorch.is_batchedtensor(x))
        return super().forward(x.flatten(1))


def tried(network, folder, executor="auto", group=8, **training):
    model = FlatModel(lambda: network(4, 3))
    return trial.faster(model, TrainingSettings(**training), executor, SHAPE, 3, group, folder)


TOGETHER, ONE_BY_ONE = Way("vectorised", False), Way("sequential", False)
LAID_OUT = Way("sequential", True)


def test_clients_train_together_if_that_is_faster(tmp_path):
    found = tried(Slow, tmp_path)
    assert set(found.seconds) == {TOGETHER, ONE_BY_ONE, LAID_OUT}
    assert found.best == TOGETHER and found.seconds[TOGETHER] < found.seconds[ONE_BY_ONE] / 4
    assert "ms a client's step; sequential" in found.why


def test_only_what_the_settings_leave_open_is_tried(tmp_path):
    assert set(tried(Slow, tmp_path, "sequential").seconds) == {ONE_BY_ONE, LAID_OUT}
    assert set(tried(Slow, tmp_path, "auto", channels_last=True).seconds) == {Way("vectorised", True), LAID_OUT}


def test_clients_of_a_network_that_cannot_be_run_together_train_one_by_one(tmp_path, monkeypatch):
    assert set(tried(Peeking, tmp_path).seconds) == {ONE_BY_ONE, LAID_OUT}
    monkeypatch.setattr(trial, "LARGEST", 20)  # a group of two would have 30 numbers
    assert set(tried(Slow, tmp_path).seconds) == {ONE_BY_ONE, LAID_OUT}


def test_whole_groups_are_not_tried_of_what_is_far_slower_for_a_few_clients(tmp_path, monkeypatch):
    counts, make = [], trial._clients
    monkeypatch.setattr(trial, "_clients", lambda *of: counts.append(of[-1]) or make(*of))
    found = tried(SlowTogether, tmp_path)
    assert max(counts) == trial.GLANCE and found.seconds[TOGETHER] > 0.01
    tried(Slow, tmp_path)
    assert max(counts) == 8


def test_clients_train_one_by_one_if_that_is_about_as_fast():
    assert trial.Trial({TOGETHER: 1.0, ONE_BY_ONE: 1.05, LAID_OUT: 1.04}).best == LAID_OUT
    assert trial.Trial({TOGETHER: 1.0, ONE_BY_ONE: 1.2, LAID_OUT: 1.3}).best == TOGETHER


def test_a_machine_tries_the_same_network_once(tmp_path, monkeypatch):
    first = tried(Slow, tmp_path)
    monkeypatch.setattr(trial, "_try", None)
    assert tried(Slow, tmp_path) == first
    with pytest.raises(TypeError):
        tried(Slow, tmp_path, batch_size=7)


def test_of_processes_that_try_at_the_same_time_the_first_one_decides(tmp_path, monkeypatch):
    other = trial.Trial({TOGETHER: 2.0, ONE_BY_ONE: 1.0})

    def meanwhile(*_):
        monkeypatch.setattr(trial, "_try", lambda *_: other)
        assert tried(Slow, tmp_path) == other
        return trial.Trial({TOGETHER: 1.0, ONE_BY_ONE: 2.0})

    monkeypatch.setattr(trial, "_try", meanwhile)
    assert tried(Slow, tmp_path) == other


def test_a_run_says_what_was_chosen_and_a_resume_keeps_it(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYPFL_CACHE", str(tmp_path / "cache"))
    events = []
    done = raypfl.run(experiment(tmp_path, rounds=1), listeners=[events.append])
    facts = next(e.facts for e in events if isinstance(e, RunStarted))
    assert facts["executor"] == done.experiment.engine.executor != "auto" and "ms a client's step" in facts["why"]
    for found in (tmp_path / "cache" / "trials").glob("*.json"):
        found.unlink()
    monkeypatch.setattr(trial, "_try", None)
    longer = raypfl.resume(done.run_dir, overrides=["rounds=2"])
    assert longer.experiment.engine.executor == facts["executor"]
