"""Choosing an executor by trying both."""

import itertools
import os
import time

import pytest
import torch
from torch import nn

import raypfl
from raypfl.evaluation import Measures
from raypfl.models import FlatModel
from raypfl.runs import autotune as trial
from raypfl.runs import driver
from raypfl.runs.autotune import Way
from raypfl.server.events import RunStarted
from raypfl.training.settings import TrainingSettings
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


class OneLayout(nn.Linear):
    """Works for one client at a time, on images channels last alone."""

    def forward(self, x):
        if not x.is_contiguous(memory_format=torch.channels_last):
            raise ValueError("rows")
        return super().forward(x.flatten(1)) * (2.0 if self.bias.sum().item() > 0 else 1.0)


class NoLayout(nn.Linear):
    """Works in no way."""

    def forward(self, x):
        raise ValueError("rows" if x.is_contiguous() else "channels last")


class SlowTogether(nn.Linear):
    """Takes its time if it is run for several clients at once."""

    def forward(self, x):
        time.sleep(0.05 * torch._C._functorch.is_batchedtensor(x))
        return super().forward(x.flatten(1))


def tried(network, folder, executor="auto", group=8, shape=SHAPE, **training):
    model = FlatModel(lambda: network(4 * shape[0], 3))
    looks = trial.Looks(shape, False, "classes", (), Measures(targets=3))
    return trial.faster(model, TrainingSettings(**training), executor, looks, group, folder)


TOGETHER, ONE_BY_ONE = Way("vectorised", False), Way("sequential", False)
LAID_OUT = Way("sequential", True)
CHOICE = ("executor", "channels_last", "why")


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


@pytest.mark.parametrize(
    ("four", "alone", "hopeless"),
    [(1.3, 1.3, True), (1.3, 1.2, True), (1.3, 4.0, False), (0.9, 0.9, False), (2.1, 8.0, True)],
)
def test_whole_groups_are_not_tried_where_a_further_client_costs_more_than_one_alone(
    four, alone, hopeless, monkeypatch
):
    """Seconds a client one by one: 1; in a group of four: `four`; in a group of one: `alone`."""
    monkeypatch.setattr(trial, "_train", lambda clients: alone)
    assert trial._is_hopeless(4, four, None, best=1.0) == hopeless


def test_what_holds_up_a_training_does_not_decide(tmp_path, monkeypatch):
    """The first training together that counts takes a thousand times as long as it should."""
    train, first_looks = trial._train, itertools.count()

    def held_up(clients):
        return train(clients) * (1000 if len(clients) == trial.GLANCE and next(first_looks) == 1 else 1)

    monkeypatch.setattr(trial, "_train", held_up)
    assert tried(Slow, tmp_path).best == TOGETHER and next(first_looks) > 1


def test_clients_train_one_by_one_if_that_is_about_as_fast():
    assert trial.Trial({TOGETHER: 1.0, ONE_BY_ONE: 1.05, LAID_OUT: 1.04}).best == LAID_OUT
    assert trial.Trial({TOGETHER: 1.0, ONE_BY_ONE: 1.2, LAID_OUT: 1.3}).best == TOGETHER


def test_ways_in_which_the_network_fails_are_left_out_with_the_reason(tmp_path):
    found = tried(OneLayout, tmp_path, shape=(3, 2, 2))
    assert found.best == LAID_OUT and set(found.seconds) == {LAID_OUT}
    assert found.left_out[ONE_BY_ONE] == "ValueError: rows" and set(found.left_out) == {ONE_BY_ONE, TOGETHER}
    assert "; sequential does not work with this network: ValueError: rows" in found.why
    assert tried(OneLayout, tmp_path, shape=(3, 2, 2)) == found


def test_a_network_that_fails_in_every_way_raises_what_it_does_in_the_plain_one(tmp_path):
    for executor in ("auto", "sequential"):
        with pytest.raises(ValueError, match="rows"):
            tried(NoLayout, tmp_path, executor, shape=(3, 2, 2))


def test_what_is_left_out_for_want_of_memory_in_whole_groups_is_not_chosen_by_its_first_look(tmp_path, monkeypatch):
    make = trial._clients

    def small(*of):
        if of[-1] > trial.GLANCE:
            raise torch.OutOfMemoryError("no room")
        return make(*of)

    monkeypatch.setattr(trial, "_clients", small)
    found = tried(Slow, tmp_path)
    assert TOGETHER not in found.seconds and found.left_out == {TOGETHER: "OutOfMemoryError: no room"}


def test_a_machine_tries_the_same_network_in_the_same_groups_once(tmp_path, monkeypatch):
    first, alone = tried(Slow, tmp_path), tried(Slow, tmp_path, "sequential")
    monkeypatch.setattr(trial, "_try", None)
    assert tried(Slow, tmp_path) == first
    assert tried(Slow, tmp_path, "sequential", group=2) == alone
    for change in ({"batch_size": 7}, {"group": 7}):
        with pytest.raises(TypeError):
            tried(Slow, tmp_path, **change)


def test_a_network_whose_code_was_mended_is_tried_again(tmp_path):
    def broken():
        class Net(nn.Linear):
            def forward(self, x):
                return super().forward(x.flatten(1)) * float(self.bias.sum())

        return Net

    def mended():
        class Net(nn.Linear):
            def forward(self, x):
                return super().forward(x.flatten(1)) * self.bias.sum()

        return Net

    assert TOGETHER in tried(broken(), tmp_path).left_out
    assert TOGETHER in tried(mended(), tmp_path).seconds


def test_findings_are_kept_where_there_are_no_hard_links(tmp_path, monkeypatch):
    def refused(*_):
        raise PermissionError("Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    found = tried(Slow, tmp_path)
    (kept,) = (tmp_path / "trials").iterdir()
    monkeypatch.setattr(trial, "_try", None)
    assert kept.suffix == ".json" and tried(Slow, tmp_path) == found


def test_a_cache_that_cannot_be_written_or_read_costs_another_trial_and_nothing_else(tmp_path):
    (tmp_path / "file").write_text("")
    assert tried(Slow, tmp_path / "file").seconds
    tried(Slow, tmp_path)
    (kept,) = (tmp_path / "trials").iterdir()
    kept.write_text("[")
    assert tried(Slow, tmp_path).seconds


def test_of_processes_that_try_at_the_same_time_the_first_one_decides(tmp_path, monkeypatch):
    other = trial.Trial({TOGETHER: 2.0, ONE_BY_ONE: 1.0})

    def meanwhile(*_):
        monkeypatch.setattr(trial, "_try", lambda *_: other)
        assert tried(Slow, tmp_path) == other
        return trial.Trial({TOGETHER: 1.0, ONE_BY_ONE: 2.0})

    monkeypatch.setattr(trial, "_try", meanwhile)
    assert tried(Slow, tmp_path) == other


@pytest.mark.parametrize(
    ("changes", "group"),
    [
        ({"engine__group_size": 1}, 1),
        ({"engine__group_size": 4}, 3),  # a cohort of 6 in two equal groups
        ({"engine__group_size": "null"}, 6),
        ({"engine__group_size": "null", "ray__clients_per_actor": 2}, 2),
        ({"engine__group_size": "null", "cohort__size": 10, "data__unseen_fraction": 0.25}, 9),
    ],
)
def test_the_trial_takes_the_largest_group_that_the_run_has(tmp_path, monkeypatch, changes, group):
    groups = []
    monkeypatch.setattr(driver, "faster", lambda *of: groups.append(of[-2]) or trial.Trial({ONE_BY_ONE: 1.0}))
    raypfl.run(experiment(tmp_path, rounds=1, **changes))
    assert groups == [group]


def test_a_run_says_what_was_chosen_and_a_resume_keeps_it(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYPFL_CACHE", str(tmp_path / "cache"))
    events = []
    done = raypfl.run(experiment(tmp_path, rounds=1), listeners=[events.append])
    metadata = next(e.metadata for e in events if isinstance(e, RunStarted))
    assert metadata["channels_last"] == done.experiment.training.channels_last
    assert metadata["executor"] == done.experiment.engine.executor != "auto" and "ms a client's step" in metadata["why"]
    for found in (tmp_path / "cache" / "trials").glob("*.json"):
        found.unlink()
    monkeypatch.setattr(trial, "_try", None)
    longer = raypfl.resume(done.run_dir, overrides=["rounds=2"])
    assert longer.experiment.engine.executor == metadata["executor"]
    assert {name: longer.metadata[name] for name in CHOICE} == {name: metadata[name] for name in CHOICE}
    other = {"vectorised": "sequential", "sequential": "vectorised"}[metadata["executor"]]
    changed = raypfl.resume(done.run_dir, overrides=["rounds=3", f"engine.executor={other}"])
    assert (changed.metadata["executor"], changed.metadata["why"]) == (other, "")
