"""Runs that differ in seeds or numbers advance together, and each has the bits that it has alone."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

import raypfl
from raypfl.common.errors import RaypflError
from raypfl.engine.events import RoundFinished
from raypfl.learning.packing import packer
from raypfl.methods import METHODS
from raypfl.runs.records import write_description
from raypfl.runs.result import RunResult
from raypfl.runs.several import resume
from raypfl.runs.several.costs import COSTS, costs_of, cpu_seconds
from raypfl.runs.several.processes import shares
from raypfl.runs.several.worker import PlannedRun, carry_out
from raypfl.runs.together import parts
from raypfl.runs.together.places import Place, run_together
from tests.support.command import hashes, interrupted, raypfl_json
from tests.support.command import raypfl as raypfl_command
from tests.support.runs import Interrupt, experiment, same_tables

TOGETHER = {"engine__executor": "vectorised", "engine__group_size": 50, "rounds": 4, "evaluation__every": 2}
SEEDS = 3


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of groups that were trained at once, trials included, in order."""
    counts: list[int] = []
    join = packer.joined

    def counting(trainings):
        counts.append(len(trainings))
        return join(trainings)

    monkeypatch.setattr(packer, "joined", counting)
    return counts


def together(planned: Sequence[raypfl.Experiment], listeners=None) -> list[RunResult | Exception]:
    folders = [Path(described.output) / f"together-{i}" for i, described in enumerate(planned)]
    for folder, described in zip(folders, planned, strict=True):
        write_description(folder, described)
    runs = [PlannedRun(folder, described) for folder, described in zip(folders, planned, strict=True)]
    outcomes = carry_out(runs, listeners or [[] for _ in folders])
    return [outcome.error or RunResult.load(run.folder) for run, outcome in zip(runs, outcomes, strict=True)]


def refuse_other_bits(planned: Sequence[raypfl.Experiment]) -> None:
    for described, outcome in zip(planned, together(planned), strict=True):
        if isinstance(outcome, Exception):
            raise outcome
        alone = raypfl.run(described)
        assert outcome.weights_hash == alone.weights_hash and same_tables(outcome, alone)


def seeds(tmp_path: Path, **changes) -> list[raypfl.Experiment]:
    return [experiment(tmp_path, seed=seed, **{**TOGETHER, **changes}) for seed in range(SEEDS)]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"method": "fedavg", "training__momentum": 0.9}, marks=pytest.mark.thorough),
        # Unequal steps, a penalty, a state, and a trained part; recorded steps.
        pytest.param({"method": "ditto", "training__epochs": 6, "training__batch_size": 8}, marks=pytest.mark.thorough),
        pytest.param({"method": "fedrep", "training__steps": 3}, marks=pytest.mark.thorough),
        pytest.param({"method": "moon"}, marks=pytest.mark.thorough),
        {"method": "scaffold", "training__weight_decay": 0.01, "training__clip_norm": 1.0},
        {"method": "fedavg", "model": "{name: cnn}", "training__steps": 2},
        {"method": "fedavg", "compression": "random_k", "compression__error_feedback": True},
    ],
    ids=["fedavg", "ditto", "fedrep", "moon", "scaffold", "cnn", "compressed"],
)
def test_seeds_together_have_the_bits_and_tables_of_lone_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, joined: list[int], changes: dict
):
    trials: list[tuple[bool, bool]] = []
    try_joined = packer.keep_bits
    monkeypatch.setattr(packer, "keep_bits", lambda trainings: trials.append(try_joined(trainings)) or trials[-1])
    refuse_other_bits(seeds(tmp_path, **changes))

    assert trials, "the trainings were not alike"
    # Whether a convolution keeps the bits of its rows depends on the processor.
    if any(keeps_bits for keeps_bits, _ in trials):
        assert joined.count(SEEDS) > 2, "nothing but a trial was trained together"
    else:
        assert "cnn" in str(changes), "this network keeps its bits on every processor known"


def rates(tmp_path: Path, *numbers: float, **changes) -> list[raypfl.Experiment]:
    return [experiment(tmp_path, training__lr=lr, **{**TOGETHER, **changes}) for lr in numbers]


@pytest.mark.parametrize(
    "changes",
    [
        # Recorded steps, and rates that differ from round to round.
        pytest.param(
            {
                "training__epochs": 6,
                "training__batch_size": 8,
                "training__schedule": "exponential",
                "training__decay": 0.9,
            },
            marks=pytest.mark.thorough,
        ),
        pytest.param({"training__momentum": 0.9, "training__nesterov": True}, marks=pytest.mark.thorough),
        {"method": "scaffold"},
        pytest.param({"training__optimizer": "adamw", "training__weight_decay": 0.1}, marks=pytest.mark.thorough),
    ],
    ids=["recorded", "momentum", "scaffold", "adamw"],
)
def test_learning_rates_together_have_the_bits_and_tables_of_lone_runs(
    tmp_path: Path, joined: list[int], changes: dict
):
    refuse_other_bits(rates(tmp_path, 0.003, 0.02, 0.1, **changes))
    assert joined.count(3) > 2, "nothing but a trial was trained together"


def test_other_numbers_together_have_the_bits_and_tables_of_lone_runs(tmp_path: Path, joined: list[int]):
    first, second, third = rates(tmp_path, 0.02, 0.02, 0.1, training__weight_decay=0.01, training__clip_norm=0.5)
    second = second.override(["training.weight_decay=0.003", "training.clip_norm=0.2", "method.server_lr=0.7"])
    third = third.override(["partition={name: classes_per_client, clients: 12, classes: 3}"])
    assert parts([first, second, third]) == [[0, 1, 2]]
    refuse_other_bits([first, second, third])
    assert joined.count(3) > 2, "nothing but a trial was trained together"


@pytest.mark.thorough
@pytest.mark.parametrize(("method", "option"), [("ditto", "lam"), ("feddyn", "alpha")])
def test_strengths_of_a_penalty_together_have_the_bits_and_tables_of_lone_runs(
    tmp_path: Path, joined: list[int], method: str, option: str
):
    planned = rates(tmp_path, 0.02, 0.02, 0.1, method=method, training__epochs=3, training__batch_size=8)
    planned = [run.override([f"method.{option}={0.3 * i + 0.1}"]) for i, run in enumerate(planned)]
    refuse_other_bits(planned)
    assert joined.count(3) > 2, "nothing but a trial was trained together"


def test_a_rate_that_diverges_leaves_the_others_bits_as_they_are(tmp_path: Path, joined: list[int]):
    planned = rates(tmp_path, 0.01, 1e4, 0.1, failures__loss_limit=50.0)
    first, diverged, last = together(planned)
    assert isinstance(diverged, RaypflError) and "diverged" in str(diverged)
    assert joined.count(2) > 1, "the others did not go on together"
    for described, outcome in ((planned[0], first), (planned[2], last)):
        assert isinstance(outcome, RunResult) and outcome.weights_hash == raypfl.run(described).weights_hash


@pytest.mark.slow
@pytest.mark.parametrize("method", list(METHODS))
def test_seeds_of_every_method_have_the_bits_of_lone_runs(tmp_path: Path, method: str):
    refuse_other_bits(seeds(tmp_path, method=method))


@pytest.mark.slow
@pytest.mark.parametrize("method", list(METHODS))
def test_numbers_of_every_method_have_the_bits_of_lone_runs(tmp_path: Path, method: str):
    planned = rates(tmp_path, 0.02, 0.03, 0.05, method=method, rounds=3)
    strengths = ("lam", "mu")
    changed = []
    for i, described in enumerate(planned):
        options = described.to_dict()["method"]
        names = [name for name in strengths if isinstance(options.get(name), float)]
        changed.append(described.override([f"method.{name}={options[name] * (1 - i / 4)}" for name in names]))
    refuse_other_bits(changed)


def test_a_run_that_fails_or_ends_early_leaves_the_others_bits_as_they_are(tmp_path: Path, joined: list[int]):
    planned = seeds(tmp_path, method="fedavg")
    planned[2] = planned[2].override(["rounds=2"])

    def fail(event) -> None:
        if isinstance(event, RoundFinished) and event.round == 1:
            raise RuntimeError("a listener's mistake")

    first, failed, early = together(planned, [[], [fail], []])
    assert isinstance(failed, RaypflError) and "a listener's mistake" in str(failed)
    for described, outcome in ((planned[0], first), (planned[2], early)):
        assert isinstance(outcome, RunResult) and outcome.weights_hash == raypfl.run(described).weights_hash


def test_a_training_that_fails_in_one_run_fails_as_it_does_alone(tmp_path: Path):
    planned = seeds(tmp_path, method="fedavg", training__lr=1e4, failures__loss_limit=5.0)
    for described, outcome in zip(planned, together(planned), strict=True):
        with pytest.raises(RaypflError) as alone:
            raypfl.run(described)
        assert str(outcome).partition(" in round")[0] == str(alone.value).partition(" in round")[0]


def test_what_a_run_warns_of_is_its_own(tmp_path: Path):
    warned: list[list[str]] = [[], [], []]
    listeners = [[lambda event, texts=texts: texts.append(getattr(event, "text", ""))] for texts in warned]
    # Each client function of FedRep warns if the network lacks the part that it names.
    together(seeds(tmp_path, method="fedbn"), listeners)
    assert all(any("batch norm" in text for text in texts) for texts in warned)


def test_nothing_is_left_in_the_process(tmp_path: Path):
    import warnings

    before = (list(warnings.filters), warnings.showwarning, threading.active_count())
    together(seeds(tmp_path, method="fedavg", rounds=1))
    assert (list(warnings.filters), warnings.showwarning, threading.active_count()) == before


def test_the_seconds_of_runs_that_advance_together_add_up_to_no_more_than_they_took(tmp_path: Path):
    planned = seeds(tmp_path, method="fedavg", rounds=30)
    start = time.perf_counter()
    results = together(planned)
    elapsed = time.perf_counter() - start
    seconds = [result.rounds["seconds"].to_pylist() for result in results if isinstance(result, RunResult)]
    assert len(seconds) == SEEDS and min(map(min, seconds)) > 0 and sum(map(sum, seconds)) <= elapsed


def test_a_second_signal_ends_runs_that_have_not_begun():
    begun_runs = []

    def interrupt_twice(place: Place) -> None:
        begun_runs.append(place.run)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
        while not place.packer._is_abandoned:
            time.sleep(0.01)

    with pytest.raises(KeyboardInterrupt):
        run_together([interrupt_twice] * 3)
    assert begun_runs == [0]


SMALL = [
    *("rounds=4", "partition.clients=8", "training.steps=3", "evaluation.every=1"),
    *("engine.backend=inline", "tracking.mlflow=false"),
]


def test_interrupted_seeds_go_on_to_the_bits_of_uninterrupted_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, joined: list[int]
):
    monkeypatch.chdir(tmp_path)
    words = ("run", *SMALL, "--method", "fedavg", "--seeds", "3")
    stopped = interrupted(monkeypatch, "fedavg", *words, round=2)
    assert stopped.exit_code == 130
    (folder,) = Path().glob("runs/digits-*")
    assert f"0 of 3 runs are finished. To continue: raypfl resume {folder}" in stopped.stderr

    resumed = raypfl_json("resume", str(folder))
    assert len(joined) > 4
    alone = [raypfl_json("run", *SMALL, "--method", "fedavg", f"seed={seed}") for seed in range(3)]
    assert hashes(resumed) == [weights_hash for outcome in alone for weights_hash in hashes(outcome)]


@pytest.mark.thorough
def test_seeds_on_ray_share_processes_and_end_with_the_bits_of_lone_inline_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_cluster: None
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(resume, "room_for_runs", lambda ray, settings, runs: 2)
    words = [word for word in SMALL if not word.startswith("engine")]
    # A method of 0.1 seconds a round, so that the signal comes before the end.
    words += ["method=tests.support.federated_methods:Slow", "rounds=15", "checkpoint.every=0", "seeds=4"]
    interrupt = Interrupt(2)
    run_as_tasks = resume.run_as_tasks

    def interrupted(ray, runs, shares, listen, stop):
        assert shares == [[0, 1], [2, 3]]
        return run_as_tasks(ray, runs, shares, lambda number, event: (listen(number, event), interrupt(event)), stop)

    with monkeypatch.context() as patch:
        patch.setattr(resume, "run_as_tasks", interrupted)
        stopped = raypfl_command("run", *words)
    assert stopped.exit_code == 130, stopped.output
    (folder,) = Path().glob("runs/digits-*")
    assert f"0 of 4 runs are finished. To continue: raypfl resume {folder}" in stopped.stderr

    went_on = []
    outcome = raypfl_json("resume", str(folder))
    for seed, run in enumerate(outcome["runs"]):
        result = RunResult.load(run["run_dir"])
        assert result.metadata["together"] == 2 and result.experiment.engine.backend == "ray"
        first_rounds = [entry["from_round"] for entry in result.history]
        went_on.append(len(first_rounds) == 2 and first_rounds[1] >= 2)
        alone = raypfl.run(result.experiment.override(["engine.backend=inline", "method=ditto", "output=apart"]))
        assert (result.experiment.seed, result.weights_hash) == (seed, alone.weights_hash)
        assert same_tables(result, alone)
    # The signal may come before the other process has finished its first rounds.
    assert any(went_on), "all began again"


def test_shares_are_as_few_as_keep_all_processes_busy():
    ten = list(range(10))
    six = list(range(10, 16))
    assert shares([ten], 2) == [ten[:5], ten[5:]]
    # Two parts for two processes need not be cut.
    assert shares([ten, six], 2) == [ten, six]
    assert shares([ten, six, [16]], 2) == [ten[:5], ten[5:], six[:3], six[3:], [16]]
    assert [len(share) for share in shares([list(range(40))], 1)] == [13, 13, 14], "at most 16 in a process"


def test_runs_advance_together_if_only_numbers_differ_and_one_thread_computes(tmp_path: Path):
    a, b, _ = seeds(tmp_path, method="fedavg")

    def are_together(*changes: str) -> bool:
        return parts([a.override(changes), b.override(changes)]) == [[0, 1]]

    assert are_together() and are_together("engine.executor=auto")
    assert not are_together("engine.executor=sequential")
    assert not are_together("engine.threads=2")
    assert are_together("engine.backend=ray") and not are_together("engine.backend=ray", "ray.actors=2")
    assert parts([a, b.override(["training.lr=0.5", "method.server_lr=0.9"])]) == [[0, 1]]
    assert parts([a, b.override(["partition=iid", "partition.clients=12"])]) == [[0, 1]]
    assert parts([a, b.override(["partition.clients=7"])]) == [[0], [1]]
    assert parts([a, b.override(["training.batch_size=5"])]) == [[0], [1]]
    assert parts([a, b.override(["method.server_optimizer=adam"])]) == [[0], [1]]


def test_a_finished_run_whose_costs_cannot_be_written_is_finished(tmp_path):
    described = experiment(tmp_path, rounds=1, engine__backend="inline")
    folder = tmp_path / "cell"
    (folder / COSTS).mkdir(parents=True)  # writing to it raises an OSError, as on a full disk
    (outcome,) = carry_out([PlannedRun(folder, described, is_shared=True)], [[]])
    assert outcome.error is None and outcome.status == "finished"


def test_cpu_seconds_are_unknown_if_a_process_that_worked_on_the_run_did_not_record_its_own(tmp_path):
    described = experiment(tmp_path, rounds=1, engine__backend="inline")
    folder = tmp_path / "cell"
    whole = PlannedRun(folder, described, is_shared=True)
    carry_out([whole], [[]])
    assert cpu_seconds([folder]) > 0 and cpu_seconds([folder, tmp_path / "never run"]) is None

    lines = (folder / COSTS).read_text().splitlines()
    assert len(list(filter(None, lines))) == 2
    lost, cut_off = lines[:-1], [*lines[:-1], lines[-1][:20]]
    for rounds, written in ((2, lost), (3, cut_off)):
        (folder / COSTS).write_text("\n".join(written))
        longer = described.replace(rounds=rounds)
        carry_out([PlannedRun(folder, longer, [f"rounds={rounds}"], is_shared=True)], [[]])
        assert cpu_seconds([folder]) is None and len(costs_of(folder)) > 1
