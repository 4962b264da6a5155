"""The guard of speed: measured ratios beside the committed ones."""

from __future__ import annotations

import json

import pytest

from benchmarks.overhead import COMMITTED, JOBS, TOLERANCE, check

RATIOS = {
    "cnn": {"inline": 1.0, "inline, channels last": 1.1, "Ray, 1 actor": 0.95, "Ray, 2 actors": 1.8},
    "mlp": {"inline": 6.0, "Ray, 1 actor": 3.0, "Ray, 2 actors": 4.0},
}


def changed(job: str, name: str, ratio: float | None) -> dict[str, dict[str, float]]:
    others = {contender: r for contender, r in RATIOS[job].items() if contender != name}
    return RATIOS | {job: others if ratio is None else others | {name: ratio}}


def test_the_committed_ratios_pass() -> None:
    assert check(RATIOS, RATIOS, jobs=["cnn", "mlp"]) == []


def test_a_ratio_that_is_clearly_worse_fails() -> None:
    (said,) = check(changed("mlp", "inline", 6.0 * (1 - TOLERANCE) - 0.01), RATIOS, jobs=["cnn", "mlp"])
    assert said == "mlp: inline is 4.49 times as fast as the bare loop, but was 6.00 times"


@pytest.mark.parametrize("ratio", [6.0 * (1 - TOLERANCE) + 0.01, 12.0])
def test_a_ratio_within_the_tolerance_or_better_passes(ratio: float) -> None:
    assert check(changed("mlp", "inline", ratio), RATIOS, jobs=["cnn", "mlp"]) == []


@pytest.mark.parametrize("name", RATIOS["cnn"])
def test_a_contender_that_was_not_measured_fails(name: str) -> None:
    (said,) = check(changed("cnn", name, None), RATIOS, jobs=["cnn", "mlp"])
    assert said.startswith(f"cnn: {name} was not measured; it was {RATIOS['cnn'][name]:.2f} times")


def test_a_contender_without_a_committed_ratio_fails() -> None:
    (said,) = check(RATIOS, changed("mlp", "Ray, 2 actors", None), jobs=["cnn", "mlp"])
    assert said.startswith("mlp: Ray, 2 actors has no ratio in overhead.json")


def test_a_job_without_any_committed_ratio_fails() -> None:
    assert len(check(RATIOS, {"cnn": RATIOS["cnn"]}, jobs=["cnn", "mlp"])) == len(RATIOS["mlp"])


def test_jobs_that_were_not_asked_for_are_not_missed() -> None:
    assert check({"mlp": RATIOS["mlp"]}, RATIOS, jobs=["mlp"]) == []


@pytest.mark.parametrize("actors", [(), (1,)])
def test_actors_that_were_left_out_are_not_missed(actors: tuple[int, ...]) -> None:
    names = {"inline", "inline, channels last", *(f"Ray, {n} actor" for n in actors)}
    measured = {job: {n: r for n, r in of.items() if n in names} for job, of in RATIOS.items()}
    assert check(measured, RATIOS, jobs=["cnn", "mlp"], actors=actors) == []
    assert check(measured, RATIOS, jobs=["cnn", "mlp"])


def test_every_job_has_committed_ratios() -> None:
    assert set(json.loads(COMMITTED.read_text())["ratios"]) == set(JOBS)
