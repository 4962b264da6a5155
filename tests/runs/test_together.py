"""Runs that differ in their seeds advance together, and each has the bits that it has alone."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

import raypfl
from raypfl.common.errors import RaypflError
from raypfl.engine.events import RoundFinished
from raypfl.learning.packing import packer
from raypfl.methods import METHODS
from raypfl.runs import driver
from raypfl.runs.result import RunResult, write_description
from raypfl.runs.together import parts
from tests.support.command import hashes, interrupted, raypfl_json
from tests.support.runs import experiment, same_tables

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


def together(planned: Sequence[raypfl.Experiment], listeners=None) -> list[RunResult | Exception | None]:
    folders = [Path(described.output) / f"together-{i}" for i, described in enumerate(planned)]
    for folder, described in zip(folders, planned, strict=True):
        write_description(folder, described)
    return driver.resume_together(folders, listeners or [[] for _ in folders])


def refuse_other_bits(planned: Sequence[raypfl.Experiment]) -> None:
    for described, outcome in zip(planned, together(planned), strict=True):
        if isinstance(outcome, Exception):
            raise outcome
        alone = raypfl.run(described)
        assert outcome is not None and outcome.weights_hash == alone.weights_hash and same_tables(outcome, alone)


def seeds(tmp_path: Path, **changes) -> list[raypfl.Experiment]:
    return [experiment(tmp_path, seed=seed, **{**TOGETHER, **changes}) for seed in range(SEEDS)]


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "fedavg", "training__momentum": 0.9},
        # Unequal steps, a penalty, a state, and a trained part; recorded steps.
        {"method": "ditto", "training__epochs": 6, "training__batch_size": 8},
        {"method": "fedrep", "training__steps": 3},
        {"method": "scaffold", "training__weight_decay": 0.01, "training__clip_norm": 1.0},
        {"method": "fedavg", "model": "{name: cnn}", "training__steps": 2},
    ],
    ids=["fedavg", "ditto", "fedrep", "scaffold", "cnn"],
)
def test_seeds_together_have_the_bits_and_tables_of_lone_runs(tmp_path: Path, joined: list[int], changes: dict):
    refuse_other_bits(seeds(tmp_path, **changes))
    # On some processors a convolution has other bits among more rows: the trial finds that, and runs train alone.
    least = 1 if "model" in changes else 3
    assert joined.count(SEEDS) >= least, "nothing but a trial was trained together"


@pytest.mark.slow
@pytest.mark.parametrize("method", list(METHODS))
def test_seeds_of_every_method_have_the_bits_of_lone_runs(tmp_path: Path, method: str):
    refuse_other_bits(seeds(tmp_path, method=method))


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
    listeners = [[lambda event, mine=mine: mine.append(getattr(event, "text", ""))] for mine in warned]
    # Each client function of FedRep warns if the network lacks the part that it names.
    together(seeds(tmp_path, method="fedbn"), listeners)
    assert all(any("batch norm" in text for text in texts) for texts in warned)


def test_nothing_is_left_in_the_process(tmp_path: Path):
    import warnings

    before = (list(warnings.filters), warnings.showwarning, threading.active_count())
    together(seeds(tmp_path, method="fedavg", rounds=1))
    assert (list(warnings.filters), warnings.showwarning, threading.active_count()) == before


SMALL = ["rounds=4", "engine.backend=inline", "partition.clients=8", "evaluation.every=1", "tracking.mlflow=false"]


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


def test_runs_advance_together_if_only_their_seeds_differ_and_one_thread_computes(tmp_path: Path):
    a, b, _ = seeds(tmp_path, method="fedavg")
    folders = [Path("a"), Path("b")]

    def are_together(*changes: str) -> bool:
        planned = [a.override(changes), b.override(changes)]
        return len(list(parts(dict(zip(folders, planned, strict=True))))) == 1

    assert are_together() and are_together("engine.executor=auto")
    assert not are_together("engine.executor=sequential")
    assert not are_together("engine.threads=2")
    assert not are_together("engine.backend=ray")
    other_method = dict(zip(folders, [a, b.override(["method.server_optimizer=adam"])], strict=True))
    assert [list(part) for part in parts(other_method)] == [[folders[0]], [folders[1]]]
