"""Several threads of a process: their results are those of one thread, or the call is refused."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import raypfl
from raypfl.common.errors import ConfigError
from raypfl.common.user_warnings import user_warnings
from raypfl.engine.events import RoundFinished
from tests.support.runs import ON_RAY, experiment

THREADS = 8


def together(calls: list[Callable[[], Any]]) -> list[Any]:
    """The results of calls that start at the same moment, each in a thread of its own."""
    start = threading.Barrier(len(calls))

    def call_at_start(call: Callable[[], Any]) -> Any:
        start.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(call_at_start, calls))


@pytest.mark.thorough
@pytest.mark.parametrize("executor", ["sequential", "vectorised"])
def test_personal_models_that_threads_fine_tune_at_once_are_those_of_one_thread(executor: str, tmp_path: Path):
    described = experiment(
        tmp_path,
        method="fedavg-ft",
        rounds=1,
        partition__clients=THREADS,
        evaluation__every=0,
        engine__executor=executor,
        model="tests.support.observing_analyses:dropping",
        training__smallest_batch=2,
    )
    models = raypfl.trained_models(raypfl.run(described).run_dir)
    images = torch.rand(5, 1, 8, 8)

    def outputs(client: int) -> torch.Tensor:
        return models.personal_model(client)(images)

    alone = [outputs(client) for client in range(THREADS)]
    for _ in range(3):
        at_once = together([partial(outputs, client) for client in range(THREADS)])
        wrong = [client for client in range(THREADS) if not torch.equal(at_once[client], alone[client])]
        assert wrong == []


def test_inline_runs_in_two_threads_have_the_bits_of_runs_one_after_the_other(tmp_path: Path):
    described = [
        experiment(tmp_path, model="tests.support.observing_analyses:dropping", training__smallest_batch=2, rounds=3),
        experiment(tmp_path, rounds=3, method="pefll", model="{name: mlp, hidden: [16]}"),
    ]
    alone = [raypfl.run(settings, run_dir=tmp_path / f"alone{k}") for k, settings in enumerate(described)]
    calls = []
    for k, settings in enumerate(described):
        calls.append(partial(raypfl.run, settings, run_dir=tmp_path / f"together{k}"))
    runs = together(calls)

    assert [run.weights_hash for run in runs] == [run.weights_hash for run in alone]
    assert runs[0].evaluations.equals(alone[0].evaluations)


@pytest.mark.usefixtures("ray_cluster")
def test_a_second_thread_may_not_run_on_the_ray_of_this_process_meanwhile(tmp_path: Path):
    first_round_done = threading.Event()
    may_go_on = threading.Event()

    def wait_after_first_round(event: object) -> None:
        if isinstance(event, RoundFinished):
            first_round_done.set()
            may_go_on.wait(60)

    described = experiment(tmp_path, **ON_RAY, rounds=2, method="fedavg")
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(raypfl.run, described, listeners=[wait_after_first_round], run_dir=tmp_path / "first")
        assert first_round_done.wait(120)
        try:
            with pytest.raises(ConfigError, match="Another thread of this process runs an experiment on Ray"):
                raypfl.run(described, run_dir=tmp_path / "second")
        finally:
            may_go_on.set()
        assert run.result().round == 2
    assert not (tmp_path / "second").exists()


def test_warnings_of_another_thread_are_not_those_of_the_function():
    def warn(text: str) -> None:
        warnings.warn(text, stacklevel=1)

    def in_another_thread(text: str) -> None:
        thread = threading.Thread(target=warn, args=(text,))
        thread.start()
        thread.join()

    with user_warnings() as texts:
        warn("mine")
        in_another_thread("an import in the background")
        with user_warnings() as inner:
            in_another_thread("another's")
            warn("mine, too")
    assert texts == {"mine"} and inner == {"mine, too"}
