"""The first hour on a GPU, rehearsed on a CPU: what it leaves when it is cut off, and what it concludes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.__main__ import STEPS, main
from benchmarks.gpu.checks import NETWORKS
from benchmarks.gpu.goals import goals
from benchmarks.gpu.groups import constants
from benchmarks.gpu.isolation import Isolated
from benchmarks.gpu.journal import Journal, Row
from benchmarks.gpu.sharing import _hashes, together
from benchmarks.gpu.steps import CUT_OFF, DONE, FAILED, Options, run, run_in_process
from benchmarks.gpu.work import Job
from raypfl.common.errors import ConfigError
from raypfl.models import MODELS
from tests.support.gpu_steps import crash, crash_at, fail, hang, process_of

pytestmark = pytest.mark.thorough

CPU = Options("cpu", quick=True)
WITHOUT = ("ray", "pyarrow", "pydantic", "mlflow", "torchvision", "pandas")


def test_the_first_hour_needs_torch_and_numpy_alone():
    program = f"""
        import sys

        class Missing:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in {WITHOUT}:
                    raise ImportError(name)

        sys.meta_path.insert(0, Missing())
        from dataclasses import replace

        from benchmarks.gpu.__main__ import STEPS
        from benchmarks.gpu.checks import NETWORKS, SMALL, compared
        from benchmarks.gpu.steps import Options
        print(compared("mlp", replace(NETWORKS["mlp"], **SMALL), "together", Options("cpu", quick=True)))
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert "'right': True, 'same_bits': True" in result.stdout, result.stderr


def test_a_step_has_half_of_the_remaining_time_and_the_last_one_all_of_it():
    now = 0.0

    def start(name: str, seconds: float) -> str:
        nonlocal now
        limits[name] = seconds
        now += {"a": 30.0, "b": 80.0}[name]
        return DONE

    limits: dict[str, float] = {}
    assert run(["a", "b", "c"], budget=100.0, start=start, clock=lambda: now) == {"a": DONE, "b": DONE}
    assert limits == {"a": 50.0, "b": 35.0}

    now = 0.0
    assert run(["a", "b"], budget=100.0, start=start, clock=lambda: now) == {"a": DONE, "b": DONE}
    assert limits == {"a": 50.0, "b": 70.0}


def test_a_step_that_hangs_fails_or_crashes_leaves_what_it_had_found(tmp_path: Path):
    file = tmp_path / "rows"
    journal = Journal(file)
    assert run_in_process(fail, "fail", CPU, file, seconds=60) == FAILED
    assert run_in_process(crash, "crash", CPU, file, seconds=60) == FAILED
    assert run_in_process(hang, "hang", CPU, file, seconds=5) == CUT_OFF
    assert [
        row.get("found", row.get("failed")) for step in ("fail", "crash", "hang") for row in journal.rows(step)
    ] == [
        2,
        "ValueError: no such kernel",
        3,
        1,
    ]


def test_a_line_that_was_cut_off_is_removed(tmp_path: Path):
    file = tmp_path / "rows"
    Journal(file).add("a", {"found": 1})
    with file.open("a") as cut_off:
        cut_off.write('{"step": "a", "fou')
    journal = Journal(file)
    journal.add("a", {"found": 2})
    assert [row["found"] for row in journal.rows("a")] == [1, 2]


def test_a_row_whose_process_dies_says_so_and_the_next_one_has_another_process():
    isolated = Isolated()
    assert isolated(crash_at, "lenet")["error"] == "the process died"
    first = isolated(process_of, "lenet")
    second = isolated(process_of, "lenet")
    assert first == second and first["process"] != os.getpid()


def test_a_process_that_fails_before_the_others_begin_says_why():
    with pytest.raises(ConfigError, match="nonesuch"):
        together(_hashes, 2, CPU, {"none": Job("nonesuch")})


def test_every_built_in_network_is_checked():
    built_in = {name for name, entry in MODELS._entries.items() if entry.__module__.startswith("raypfl.")}
    made_of_others = {"heterogeneous"}
    assert {name for name in built_in - made_of_others if ":" not in name} == set(NETWORKS)


def test_the_rules_constants_follow_from_what_was_faster():
    def point(work: int, one_by_one: float, *together: float) -> tuple[int, float, list[tuple[int, Row]]]:
        sizes = (2, 10, 50, 100)
        return (
            work,
            one_by_one,
            [(size, {"clients_per_second": rate}) for size, rate in zip(sizes, together, strict=True)],
        )

    small = point(2**20, 10, 5, 50, 100, 100)
    large = point(2**30, 10, 5, 6, 7, 20)
    (row,) = constants([small, large])
    assert (row["smallest_group"], row["largest_step"], row["consistent"]) == (10, "2**25.0", True)
    assert next(constants([small]))["largest_step"] == "at least 2**20.0"
    assert next(constants([large]))["largest_step"] == "below 2**30.0"


def test_goals_are_those_of_the_files_rows(tmp_path: Path):
    def all_goals(journal: Journal) -> list[str]:
        return [goal for step in STEPS for goal in goals(journal, step)]

    journal = Journal(tmp_path / "rows")
    assert all("not measured" in goal for goal in all_goals(journal))
    for group, times in ((10, 8.0), (50, 12.0)):
        journal.add("groups", {"network": "mlp", "group": group, "of_plain_PyTorch": times})
    journal.add("groups", {"network": "lenet", "group": 50, "of_plain_PyTorch": 9.0})
    for executor, rate in (("vectorised", 900.0), ("plain PyTorch", 300.0)):
        journal.add("pfl", {"executor": executor, "processes": 4, "clients_per_second": rate})
    journal.add("bits", {"processes": 1, "same_bits": True})
    journal.add("bits", {"processes": 2, "same_bits": False})
    journal.add("check", {"network": "cnn", "way": "together", "right": False, "error": "ValueError: x"})
    journal.add("check", {"operation": "scatter_add_", "same_bits": True})

    journal.add("agreement", {"method": "fedavg", "right": True, "same_bits": True})
    journal.add("agreement", {"method": "ditto", "right": False, "error": "ValueError: x"})

    right, stable, bits, mlp, lenet, pfl, methods = all_goals(journal)
    assert right.endswith("NOT MET by cnn together") and stable.endswith("met, 1 of 1")
    assert methods.endswith("every method computes what a CPU does: NOT MET by ditto")
    assert "met, 12.0 times" in mlp and "NOT MET, 9.0 times" in lenet
    assert "900, vectorised, processes: 4; 3.0 times the best of the plain loop" in pfl
    assert bits.endswith("NOT MET by 2")

    # What was mended is measured again; other steps keep their rows.
    journal.add("begin", {})
    journal.add("bits", {"processes": 2, "same_bits": True})
    (bits,) = goals(journal, "bits")
    assert bits.endswith("met, 1 of 1")
    assert [goal for goal in all_goals(journal) if goal != bits] == [right, stable, mlp, lenet, pfl, methods]


def test_a_file_of_another_card_is_left_alone(tmp_path: Path, capsys, monkeypatch):
    file = tmp_path / "rows"
    Journal(file).add("begin", {"card": "H100", "quick": False})
    assert main(["--device", "cpu", "--json", str(file)]) == 2
    assert "another card" in capsys.readouterr().err and len(file.read_text().splitlines()) == 1

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 2 and "no GPU on this machine" in capsys.readouterr().err


def test_a_goal_is_printed_with_its_step_and_the_steps_left_out_are_named(tmp_path: Path, monkeypatch):
    file = tmp_path / "rows"

    def begin(measure: object, name: str, options: Options, path: Path, seconds: float) -> str:
        Journal(path).add(name, {"processes": 2, "same_bits": True})
        return DONE

    now = iter([0.0, 0.0, 1000.0])
    monkeypatch.setattr("benchmarks.gpu.__main__.run_in_process", begin)
    monkeypatch.setattr("benchmarks.gpu.__main__.run", partial(run, clock=lambda: next(now)))
    assert main(["--device", "cpu", "--quick", "--steps", "pfl", "bits", "--json", str(file)]) == 1
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["step"] for row in rows] == ["begin", "bits", "goal", "pfl"]
    assert rows[2]["about"].endswith("met, 1 of 1 (a rehearsal)")
    assert rows[3]["about"] == "left out: the 9 minutes are over"
