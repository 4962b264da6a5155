"""Runs whose method fails: what is recorded, and how to go on."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from raypfl import Clients, Cohort, Mean, Method, Result, Task
from raypfl.methods import FedAvg
from raypfl.storage.lease import hold_lease
from tests.support.command import raypfl

SMALL = [
    *("rounds=1", "partition.clients=4", "training.steps=1"),
    *("engine.backend=inline", "engine.executor=vectorised", "tracking.mlflow=false"),
]


class FailsAtStart(FedAvg):
    def start(self, task: Task) -> dict:
        raise KeyError("theta")


class FailsInEvaluation(FedAvg):
    def personal_model(self, clients: Clients, server: dict) -> Tensor:
        return clients.initial.repeat(len(clients), 1) * float("nan")


class FailsInRoundTwo(FedAvg):
    def round(self, server: dict, cohort: Cohort) -> None:
        if cohort.round == 2:
            raise KeyError("theta")
        super().round(server, cohort)


class FailsOnClientsInRoundTwo(FedAvg):
    def train(self, clients: Clients, theta: Tensor) -> dict:
        if clients.round == 2:
            raise KeyError("theta")
        return super().train(clients, theta)


class RepliesAnotherName(FedAvg):
    def train(self, clients: Clients, theta: Tensor) -> dict:
        return {"model": Mean(theta.expand(len(clients), -1), weight=clients.num_samples)}


class StartsWithAnotherName(FedAvg):
    def start(self, task: Task) -> dict:
        return {"model": task.model.init(task.seed)}


def run_that_fails(method: str, folder: Path, *words: str) -> str:
    """What a command prints last whose run of a method fails."""
    ended = raypfl("run", *SMALL, *words, "--method", method, "--run-dir", str(folder))
    assert ended.exit_code == 1
    return ended.stderr


def test_a_failure_in_start_is_recorded_like_one_in_a_round(tmp_path: Path):
    folder = tmp_path / "run"
    printed = run_that_fails(f"{__name__}:FailsAtStart", folder)
    result = Result.load(folder)
    assert (result.status, result.round) == ("failed", 0)

    reported = raypfl("report", str(folder)).stderr
    for text in (printed, reported):
        assert (
            "FailsAtStart.start (test_failures.py, line " in text and "failed before round 1: KeyError: 'theta'" in text
        )
        assert "raypfl resume" not in text


@pytest.mark.parametrize("method", ["FailsAtStart", "FailsInEvaluation"])
def test_the_last_line_of_a_run_that_failed_without_a_checkpoint_names_its_folder(tmp_path: Path, method: str):
    folder = tmp_path / "run"
    printed = run_that_fails(f"{__name__}:{method}", folder)
    reason = "No round was finished." if method == "FailsAtStart" else f"{folder} has no checkpoint that can be read."
    remedy = f"Fix what failed; then, to start again: raypfl run {folder}/experiment.yaml"
    assert printed.endswith(f"\n{reason} {remedy}\n")


@pytest.mark.parametrize("location", ["/proc/nowhere/store", "nowhere://bucket/store"])
@pytest.mark.parametrize("methods", ["fedavg", "fedavg,local"])
def test_a_location_of_checkpoints_that_cannot_be_used_is_refused_and_leaves_no_folder(
    tmp_path: Path, location: str, methods: str
):
    folder = tmp_path / "runs" / "mine"
    words = [*SMALL, f"checkpoint.location={location}", "--method", methods, "--run-dir", str(folder)]
    refused = raypfl("run", *words)
    assert (refused.exit_code, "heckpoint" in refused.stderr) == (2, True)
    assert "again" not in refused.stderr and not folder.exists()


def test_a_comparison_that_has_saved_nothing_names_the_command_that_begins_it_again(tmp_path: Path):
    (tmp_path / "file").touch()
    folder = tmp_path / "compared"
    unreadable = f"checkpoint.location={tmp_path}/file/store"
    printed = run_that_fails("fedavg,local", folder, unreadable)
    words = printed.rpartition("to start again: raypfl ")[2].split()
    assert words == ["resume", str(folder)]
    assert raypfl(*words, "checkpoint.location=null", "--quiet").exit_code == 0


def test_a_command_for_a_run_that_is_already_running_says_to_wait_and_not_to_start_it_again(tmp_path: Path):
    folder = tmp_path / "run"
    method = f"{__name__}:FailsAtStart"
    run_that_fails(method, folder)
    with hold_lease(str(folder / "checkpoints"), "another attempt", print):
        assert run_that_fails(method, folder).endswith(" Wait for it to end, or stop it there.\n")


@pytest.mark.parametrize("method", ["FailsInRoundTwo", "FailsOnClientsInRoundTwo"])
def test_a_run_whose_method_fails_after_a_checkpoint_says_that_it_must_be_mended(tmp_path: Path, method: str):
    assert says_to_mend(tmp_path / "run", method, "inline")


def test_a_run_whose_method_fails_on_actors_says_that_it_must_be_mended(tmp_path: Path, ray_cluster: None):
    assert says_to_mend(tmp_path / "run", "FailsOnClientsInRoundTwo", "ray")


def says_to_mend(folder: Path, method: str, backend: str) -> bool:
    arguments = [*SMALL[1:], "rounds=3", "checkpoint.every=1", f"engine.backend={backend}"]
    ended = raypfl("run", *arguments, "--method", f"{__name__}:{method}", "--run-dir", str(folder))
    return ended.stderr.endswith(f"Fix what failed; then, to continue: raypfl resume {folder}\n")


def test_a_mistake_that_a_rehearsed_round_finds_is_a_refusal_which_leaves_no_folder(tmp_path: Path):
    folder = tmp_path / "run"
    method = f"{__name__}:RepliesAnotherName"
    refused = raypfl("run", *SMALL, "devices.hardware=lognormal", "--method", method, "--run-dir", str(folder))
    assert refused.exit_code == 2 and "returned 'model'; there is no 'theta'" in refused.stderr
    assert not folder.exists()


def test_a_comparison_says_that_a_method_which_failed_at_its_start_must_be_mended(tmp_path: Path):
    printed = run_that_fails(f"fedavg,{__name__}:FailsAtStart", tmp_path / "runs")
    assert printed.endswith(f"Fix what failed; then, to start it again: raypfl resume {tmp_path}/runs\n")


@pytest.mark.parametrize("mistaken", [FailsAtStart, StartsWithAnotherName])
def test_a_run_without_a_finished_round_resumes_from_the_mended_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistaken: type[Method]
):
    folder = tmp_path / "run"
    run_that_fails(f"{__name__}:{mistaken.__name__}", folder)
    monkeypatch.setattr(mistaken, "start", FedAvg.start)
    assert raypfl("resume", str(folder)).exit_code == 0
    assert Result.load(folder).status == "finished"
