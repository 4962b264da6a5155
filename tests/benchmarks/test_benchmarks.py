"""Benchmarks run in their smallest form, and compute what they print."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import benchmarks.memory
import raypfl
from benchmarks import digits, evaluation, frozen, head, methods, overhead, packed, states
from benchmarks.circumstances import circumstances, processor
from benchmarks.memory import PARTS, descendants, memory
from benchmarks.noise import ONLY_ROUNDS, SETS, Noise
from benchmarks.overhead import COMMITTED, JOBS, TOLERANCE, Plan, check
from benchmarks.scheduling import JOBS as REPLAYED
from benchmarks.scheduling import rounds

pytestmark = pytest.mark.thorough

TINY = Noise("tiny", 6, (1, 8, 8), 3, 9, tests=2)
RATIOS = {
    "cnn": {"inline": 1.0, "inline, channels last": 1.1, "Ray, 1 actor": 0.95, "Ray, 2 actors": 1.8},
    "mlp": {"inline": 6.0, "Ray, 1 actor": 3.0, "Ray, 2 actors": 4.0},
}


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SETS, "tiny", TINY)


def test_raypfl_and_the_bare_loop_take_turns(tmp_path, monkeypatch):
    monkeypatch.setitem(JOBS, "mlp", replace(JOBS["mlp"], noise=TINY, cohort=3))
    times = overhead.train("mlp", Plan(str(tmp_path), repeats=2, rounds=2, actors=()))
    assert {name: (len(t.rounds), len(t.first)) for name, t in times.items()} == {"bare": (4, 2), "inline": (4, 2)}
    assert all(0 < worked < took for took, worked in zip(times["inline"].rounds, times["inline"].worked, strict=True))
    assert overhead.ratios({"mlp": times})["mlp"]["inline"] == pytest.approx(
        min(times["bare"].rounds) / min(times["inline"].rounds), abs=1e-3
    )


@pytest.mark.parametrize(
    ("job", "contender", "ratio", "sentence"),
    [
        ("mlp", "inline", 6.0, None),
        ("mlp", "inline", 6.0 * (1 - TOLERANCE) + 0.01, None),
        ("mlp", "inline", 4.49, "mlp: inline is 4.49 times as fast as the bare loop, but was 6.00 times"),
        ("cnn", "Ray, 1 actor", None, "cnn: Ray, 1 actor was not measured; it was 0.95 times as fast as the bare loop"),
        ("cnn", "new", 1.0, "cnn: new has no ratio in overhead.json to compare with; write one with --json"),
    ],
)
def test_a_ratio_that_is_worse_than_the_committed_one_or_missing_fails(job, contender, ratio, sentence):
    ratios = {name: committed for name, committed in RATIOS[job].items() if name != contender}
    if ratio is not None:
        ratios[contender] = ratio
    problems = check(RATIOS | {job: ratios}, RATIOS, jobs=list(RATIOS))
    assert problems == ([] if sentence is None else [sentence])


def test_jobs_and_actors_that_were_left_out_are_no_problem():
    inline = {"mlp": {"inline": 6.0}}
    assert check(inline, RATIOS, jobs=["mlp"], actors=()) == []
    assert len(check(inline, RATIOS, jobs=["mlp"])) == 2


def test_every_job_has_committed_ratios():
    assert set(json.loads(COMMITTED.read_text())["ratios"]) == set(JOBS)


def test_evaluations_are_timed_beside_their_forward_passes(monkeypatch):
    monkeypatch.setitem(SETS, "pixels_10", replace(TINY, name="pixels_10"))
    result = evaluation.measured("mlp", "fp32", 10, repeats=2)
    assert result["executor"] and result["ratio"] == result["raypfl"]["min"] / result["bare"]["min"] > 0


@pytest.mark.parametrize("keep", [True, False])
def test_clients_keep_their_networks_or_do_not(tmp_path, monkeypatch, keep):
    monkeypatch.setitem(SETS, "states", replace(TINY, name="states"))
    described = states.experiment(str(tmp_path), keep, train=True, rounds=2)
    result = raypfl.run(described.override(["engine.backend=inline", "model.hidden=[4]"]))
    for client in (0, 5):
        assert sorted(result.client_state(client)) == (["own"] if keep else [])


def test_frozen_parts_of_a_network_are_not_in_a_clients_vector(tmp_path):
    frozen.train("head", "frozen", 1, str(tmp_path))
    sizes = json.loads((tmp_path / "sizes.json").read_text())
    assert (sizes["vector"], sizes["group"]) == (5130, 1)


def test_sleepers_report_how_many_sleep_at_a_time(tmp_path):
    method = {"name": "benchmarks.head:Sleeper"}
    engine = {"backend": "inline", "group_size": 1}
    result = raypfl.run(head.experiment(str(tmp_path), 2, rounds=1, method=method, engine=engine))
    assert result.server_state()["at_once"] == [1] and result.server_state()["slept"][0] > 0.2
    times = torch.tensor([[0, 3], [1, 3], [2, 3], [4, 5]], dtype=torch.float64)
    assert head.at_once(times) == 3


def test_replayed_actors_idle_longer_if_the_server_handles_replies_slowly():
    fast, slow = (rounds(replace(REPLAYED["mlp"], reply=reply), actors=64) for reply in (0.0, 0.005))
    assert fast.bound <= fast.idle < slow.idle and fast.groups == 20


def test_results_name_the_commit_and_whether_what_is_measured_differs_from_it(tmp_path):
    files = [tmp_path / name for name in ("raypfl/file", "benchmarks/results/file", "docs/file")]
    for file in files:
        file.parent.mkdir(parents=True)
        file.write_text("committed")
    assert circumstances(tmp_path)["commit"] is None, "the folder is no repository yet"

    author = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "all of it"]):
        subprocess.run(["git", "-C", str(tmp_path), *author, *arguments], check=True)

    clean = circumstances(tmp_path)["commit"]
    for file, expected in zip(reversed(files), (clean, clean, f"{clean}-dirty"), strict=True):
        file.write_text("changed")
        assert circumstances(tmp_path)["commit"] == expected


def test_a_processor_is_told_by_its_numbers_and_vector_instructions_where_its_name_is_hidden(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    assert "(" not in processor(cpuinfo), "no such file, as on macOS"
    for flag, has_it in (("avx2", "without"), ("avx2 avx512f", "with")):
        core = f"processor\t: 0\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\nflags\t\t: fpu {flag}\n\n"
        cpuinfo.write_text(2 * core)
        assert processor(cpuinfo).endswith(f" (AMD EPYC, family 25, model 17, {has_it} AVX-512)")


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's processes; sizes in kB, which the kernel means to be 1024 bytes."""
    monkeypatch.setattr(benchmarks.memory, "PROC", tmp_path)
    running: list[tuple[Any, ...]] = [
        (1, 0, "init", 7000, 0),
        (10, 1, "python driver.py", 5000, 2000),
        (11, 10, "raylet", 3000, 0),
        (12, 11, "ray::ServerActor.run", 4000, 1000),
        (13, 11, "ray::ClientActor", 6000, 0),
    ]
    for pid, parent, command, pss, shared in running:
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a (name)) S {parent} " + "0 " * 17 + f"{100 + pid} 0\n")
        (tmp_path / str(pid) / "cmdline").write_bytes(command.replace(" ", "\0").encode())
        (tmp_path / str(pid) / "smaps_rollup").write_text(
            f"0-1 ---p 0 00:00 0 [rollup]\nRss: {9 * pss} kB\nPss: {pss} kB\nPss_Anon: 1 kB\nPss_Shmem: {shared} kB\n"
        )
    return tmp_path


def test_memory_is_counted_by_what_processes_are_for_in_millions_of_bytes(proc):
    expected = {"driver": 3.072, "server": 3.072, "clients": 6.144, "store": 3.072, "ray": 3.072}
    assert memory(10) == pytest.approx(expected) and tuple(expected) == PARTS
    assert {process.pid for process in descendants(11)} == {11, 12, 13}

    (proc / "13" / "smaps_rollup").unlink()  # it has ended meanwhile
    assert memory(10)["clients"] == 0


def test_a_round_of_a_method_is_timed_beside_fedavg_and_less_than_a_round_is_refused(capsys):
    methods.main(["--methods", "fedproto", "--rounds", "1", "model={name: mlp, hidden: [4]}", "partition.clients=4"])
    row = capsys.readouterr().out.splitlines()[3]
    name, seconds, ratio, _ = (cell.strip() for cell in row.strip("|").split("|"))
    assert name == "fedproto" and float(seconds) > 0 and float(ratio) > 0

    with pytest.raises(SystemExit):
        methods.main(["--rounds", "0"])
    assert "0 is no number of rounds to measure" in capsys.readouterr().err


def test_runs_that_advance_together_end_as_they_do_alone(tmp_path):
    parts = ONLY_ROUNDS | {"rounds": 2, "engine": {"backend": "inline", "executor": "vectorised"}}
    experiment = digits.experiment(str(tmp_path), 2, 1, **parts)
    hashes = [packed.seconds(tmp_path, experiment, packed.rates(2), together)[1] for together in (False, True)]
    assert hashes[0] == hashes[1] and len(set(hashes[0])) == 2
