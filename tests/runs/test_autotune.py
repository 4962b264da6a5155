"""Choosing an executor and a layout, by a rule or by timing."""

import math
import time

import pytest
import torch
from torch import nn

import raypfl
from raypfl.common.errors import ConfigError
from raypfl.data import load_federated
from raypfl.engine.events import RunStarted
from raypfl.engine.prepared import Prepared
from raypfl.experiment.identity import differences, harmless_changes
from raypfl.runs.choices import autotune
from raypfl.runs.choices.autotune import GIB, Candidate, Load, choose, rule
from raypfl.runs.preparing import prepare
from tests.support.runs import experiment

TOGETHER = Candidate("vectorised", False)
ONE_BY_ONE = Candidate("sequential", False)
CHANNELS_LAST = Candidate("sequential", True)
CHOICE = ("executor", "channels_last", "why")


class Dense(nn.Linear):
    """One layer."""

    def __init__(self, input_shape, num_classes):
        super().__init__(math.prod(input_shape), num_classes)

    def forward(self, x):
        return super().forward(x.flatten(1))


class Normalised(Dense):
    """A network whose model vectors have further entries: the statistics of batch norm."""

    def __init__(self, input_shape, num_classes):
        super().__init__(input_shape, num_classes)
        self.norm = nn.BatchNorm1d(num_classes)

    def forward(self, x):
        return self.norm(super().forward(x))


class Slow(Dense):
    """A network whose calls each take 5 ms, for any number of clients."""

    def forward(self, x):
        time.sleep(0.005)
        return super().forward(x)


class SlowTogether(Dense):
    """A network that is slow under vmap: 100 ms a call for several clients at once."""

    def forward(self, x):
        time.sleep(0.1 * torch._C._functorch.is_batchedtensor(x))
        return super().forward(x)


class Peeking(Dense):
    """A network that vmap refuses: its result depends on the value of a tensor."""

    def forward(self, x):
        return super().forward(x) * (2.0 if self.bias.sum().item() > 0 else 1.0)


class OneLayout(Peeking):
    """A network that needs images with channels last, and one client at a time."""

    def forward(self, x):
        if not x.is_contiguous(memory_format=torch.channels_last):
            raise ValueError("rows")
        return super().forward(x)


class NoLayout(Dense):
    """A network whose every call fails."""

    def forward(self, x):
        raise ValueError("nothing works")


def choice_for(tmp_path, network=Dense, **changes):
    changes = {"engine__group_size": 6} | changes
    settings = experiment(tmp_path, **changes).replace(model=f"{__name__}:{network.__name__}")
    data = settings.load_data()
    return choose(Prepared(settings, data))


@pytest.mark.parametrize(
    ("parameters", "work", "group", "executor"),
    [
        (9_610, 96_100, 20, "vectorised"),
        (9_610, 96_100, 3, "vectorised"),
        (9_610, 96_100, 2, "sequential"),
        (9_610, 9_840_640, 50, "sequential"),
        (407_050, 407_050, 50, "sequential"),
    ],
)
def test_small_networks_train_together_and_large_ones_or_large_steps_do_not(parameters, work, group, executor):
    assert rule(Load(parameters, work, group))[0] == executor


@pytest.mark.parametrize(
    ("load", "share", "executor"),
    [
        (Load(121_182, 74_487_040, 50, GIB), 1.0, "vectorised"),  # LeNet in batches of 32
        (Load(1_626_442, 168_000_000, 50, 2 * GIB), 1.0, "vectorised"),  # pfl-research's CNN in batches of 10
        (Load(1_626_442, 168_000_000, 3), 1.0, "sequential"),
        (Load(11_181_642, 370_000_000, 50), 1.0, "vectorised"),  # ResNet-18 in batches of 10
        (Load(11_181_642, 1_180_000_000, 50), 1.0, "sequential"),  # and of 32
        (Load(20_000_000, 200_000_000, 50, 14 * GIB), 1.0, "vectorised"),
        (Load(20_000_000, 200_000_000, 50, 14 * GIB), 0.5, "sequential"),
    ],
)
def test_on_a_gpu_clients_train_together_unless_a_step_fills_it_or_their_memory_does(load, share, executor):
    assert rule(load, "cuda", share)[0] == executor


@pytest.mark.parametrize(
    ("changes", "executor"),
    [({}, "sequential"), ({"ray__gpus_per_actor": 0.5}, "vectorised"), ({"ray__gpus_per_actor": 0.001}, "sequential")],
)
def test_the_rule_is_that_of_the_actors_device_which_the_driver_need_not_have(tmp_path, changes, executor):
    changes = {"engine__backend": "ray", "model": "cnn", "engine__group_size": 6, "training__batch_size": 60} | changes
    described = experiment(tmp_path, **changes)
    data = load_federated(described.data, described.partition, seed=0)
    best, why = choose(Prepared(described, data))
    assert best.executor == executor
    assert ("6 clients together may need" in why) == (changes.get("ray__gpus_per_actor") == 0.001)


def test_convolutions_train_one_by_one_channels_last_once_their_steps_are_large(tmp_path):
    def by_rule(size):
        described = experiment(tmp_path, model="cnn", engine__group_size=6, training__batch_size=size)
        data = load_federated(described.data, described.partition, seed=0)
        return choose(Prepared(described, data))[0]

    assert (by_rule(2), by_rule(100)) == (TOGETHER, CHANNELS_LAST)


def test_a_step_has_no_more_samples_than_the_largest_client(tmp_path):
    best, why = choice_for(tmp_path, training__batch_size=10**9)
    assert best == TOGETHER

    work = int(why.split(", ")[1].split()[0].replace(",", ""))
    assert work < 2000 * 650


def test_the_multiplications_of_a_step_count_no_bias(tmp_path):
    _, why = choice_for(tmp_path, training__batch_size=10)
    assert why == "a small network: 650 parameters, 6,400 multiplications a step"


def test_the_reason_has_the_number_of_parameters_that_a_run_names_though_batch_norm_has_statistics_too(tmp_path):
    _, why = choice_for(tmp_path, Normalised, training__batch_size=10)
    assert why.startswith("a small network: 670 parameters, ")
    assert rule(Load(2**17 - 9, 1, 9))[0] == "vectorised"
    assert rule(Load(2**17 - 9, 1, 9, statistics=20))[0] == "sequential"


def test_only_what_the_settings_leave_open_is_chosen(tmp_path):
    assert choice_for(tmp_path, engine__executor="sequential") == (ONE_BY_ONE, "")
    assert choice_for(tmp_path, training__channels_last="true")[0] == Candidate("vectorised", True)
    assert choice_for(tmp_path, Peeking, training__channels_last="true")[0] == CHANNELS_LAST


def test_candidates_in_which_the_network_fails_are_left_out_with_the_reason(tmp_path):
    best, why = choice_for(tmp_path, Peeking)
    assert best == ONE_BY_ONE and why.startswith("vectorised does not work with this network: ")
    assert "file an issue" not in why
    best, why = choice_for(tmp_path, OneLayout, data__name="tests.models.test_layouts:coloured")
    assert best == CHANNELS_LAST and "; sequential does not work with this network: ValueError: rows" in why


@pytest.mark.parametrize("executor", ["auto", "fastest", "sequential"])
def test_a_network_that_always_fails_raises_its_own_error(tmp_path, executor):
    with pytest.raises(ValueError, match="nothing works"):
        choice_for(tmp_path, NoLayout, engine__executor=executor)


def test_the_fastest_candidate_is_chosen_on_request(tmp_path):
    best, why = choice_for(tmp_path, Slow, engine__executor="fastest")
    assert best == TOGETHER and why.count("ms a client's step") == 3
    assert choice_for(tmp_path, SlowTogether, engine__executor="fastest")[0] != TOGETHER
    best, why = choice_for(tmp_path, Peeking, engine__executor="fastest")
    assert best != TOGETHER and "; vectorised does not work" in why


def test_timing_that_would_take_too_long_leaves_the_choice_to_the_rule(tmp_path, monkeypatch):
    monkeypatch.setattr(autotune, "MAX_SECONDS", 0.0)
    best, why = choice_for(tmp_path, SlowTogether, engine__executor="fastest")
    assert best == TOGETHER and why.startswith("timing would take more than 0 s; a small network")


@pytest.mark.parametrize(
    ("changes", "group"),
    [
        ({"engine__group_size": 1}, 1),
        ({"engine__group_size": 4}, 3),  # a cohort of 6 in two equal groups
        ({"engine__group_size": "null"}, 6),
        ({"engine__group_size": "null", "cohort__size": 10, "data__unseen_fraction": 0.25}, 9),
    ],
)
def test_the_rule_takes_the_largest_group_that_the_run_has(tmp_path, monkeypatch, changes, group):
    groups = []

    def record_group(load, device, share):
        groups.append(load.clients)
        return "sequential", ""

    monkeypatch.setattr(autotune, "rule", record_group)
    choice_for(tmp_path, **changes)
    assert groups == [group]


def test_a_run_says_what_was_chosen_and_a_resume_keeps_it(tmp_path):
    events = []
    first_run = raypfl.run(experiment(tmp_path, rounds=1, engine__executor="fastest"), listeners=[events.append])
    metadata = next(e.metadata for e in events if isinstance(e, RunStarted))

    assert metadata["channels_last"] == first_run.experiment.training.channels_last
    assert metadata["executor"] == first_run.experiment.engine.executor != "fastest"
    assert "ms a client's step" in metadata["why"]

    longer = raypfl.resume(first_run.run_dir, overrides=["rounds=2"])
    assert {name: longer.metadata[name] for name in CHOICE} == {name: metadata[name] for name in CHOICE}

    other = {"vectorised": "sequential", "sequential": "vectorised"}[metadata["executor"]]
    with pytest.raises(ConfigError, match=r"engine.executor is .* decides its result"):
        raypfl.resume(first_run.run_dir, overrides=["rounds=3", f"engine.executor={other}"])


def test_graphs_that_were_turned_off_for_clients_that_then_train_one_by_one_are_no_obstacle(tmp_path):
    asked = experiment(tmp_path, engine__backend="ray", ray__gpus_per_actor=1, engine__cuda_graphs=False)
    assert asked.cohort.size == 6 and asked.engine.group_size == 2  # too few for a group
    _, prepared = prepare(asked, tmp_path / "run", emit=lambda event: None, lockstep=False)
    started = prepared.experiment
    assert started.engine.executor == "sequential"
    assert started.replace(seed=1).override(["rounds=7"]).engine.cuda_graphs
    assert not differences(asked, started) and not harmless_changes(asked, started)
