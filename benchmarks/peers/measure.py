"""One run of one contender: started, watched and stopped from outside."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.memory import Process, descendants, processes, proportional
from benchmarks.peers.order import Stamps

POLL = 0.2
STOPPING = 20.0
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Patience:
    """How long a run goes on.

    Attributes
    ----------
    settle : seconds after the first round until rounds are counted: other actors come up, memory is claimed.
    rounds, seconds : counted rounds, and their seconds together, that are enough, both.
    limit : seconds after which a run is stopped whatever it has done.
    """

    settle: float = 2.0
    rounds: int = 3
    seconds: float = 5.0
    limit: float = 150.0


@dataclass
class Run:
    """What was measured.

    Attributes
    ----------
    startup : seconds from the start of the process to the end of the first round; None if there was none.
    rounds : seconds of the counted rounds.
    memory : of two sums of its processes' proportional set sizes the higher, in bytes; None where there is no /proc.
    problem : a sentence, if something went wrong.
    notes : what the contender told beside its rounds, see `order.Stamps.note`.
    """

    startup: float | None = None
    rounds: list[float] = field(default_factory=list)
    memory: int | None = None
    problem: str | None = None
    notes: dict[str, Any] = field(default_factory=dict)


def parse(lines: Iterable[str], started: float, settle: float) -> tuple[float | None, list[float]]:
    """Start-up and counted rounds from the lines that `order.Stamps` writes; a line cut short is not there yet.

    A round is counted if it began `settle` seconds after the first one ended, or later.
    """
    stamps = [json.loads(line) for line in lines if line.endswith("\n")]
    if not stamps:
        return None, []
    first = stamps[0]["end"]
    counted = []
    for before, stamp in itertools.pairwise(stamps):
        begin = before["end"] if stamp["begin"] is None else stamp["begin"]
        if begin >= first + settle:
            counted.append(stamp["end"] - begin)
    return first - started, counted


def measure(command: list[str], report: Path, patience: Patience) -> Run:
    """Run a command until its report has enough rounds.

    Memory is read when the first round is over and after the last that counts, never between: that walks all pages
    of all processes, and takes tens of milliseconds from each.
    """
    # Not in $TMPDIR: the paths of Ray's sockets must be short.
    scratch = tempfile.mkdtemp(prefix="peers-", dir="/tmp")
    log = report.with_suffix(".log")
    started = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=_variables(scratch), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    run, tree = Run(), set[Process]()
    try:
        _watch(run, process, tree, report, started, patience)
    finally:
        tree |= descendants(process.pid)
        _stop(process, tree)
        shutil.rmtree(scratch, ignore_errors=True)
    run.notes = Stamps(str(report)).notes()
    if run.problem is None and not run.rounds:
        run.problem = f"No round after the first was finished within {patience.limit:.0f} s."
        if run.startup is None:
            run.problem = f"No round was finished within {patience.limit:.0f} s."
    elif run.problem is not None:
        run.problem += f" Its last line: {_last_line(log)}"
    return run


def _watch(
    run: Run, process: subprocess.Popen[bytes], tree: set[Process], report: Path, started: float, patience: Patience
) -> None:
    looked = False
    while time.monotonic() < started + patience.limit:
        lines = report.read_text().splitlines(keepends=True) if report.exists() else []
        run.startup, run.rounds = parse(lines, started, patience.settle)
        if len(run.rounds) >= patience.rounds and sum(run.rounds) >= patience.seconds:
            break
        if process.poll() is not None:
            run.problem = f"It ended by itself with exit code {process.returncode}."
            return
        if run.startup is not None and not looked:
            looked = True
            _sample(run, process.pid, tree)
        time.sleep(POLL)
    _sample(run, process.pid, tree)


def _sample(run: Run, root: int, tree: set[Process]) -> None:
    tree |= descendants(root)
    memory = 0
    for process in tree:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            memory += proportional(process.pid).get("Pss", 0)
    if memory:
        run.memory = max(run.memory or 0, memory)


def _variables(scratch: str) -> dict[str, str]:
    """One thread a process; Ray's workers on a level with the process that drives them; nothing told to anybody.

    Bytecode is kept, as on a user's machine.
    """
    unset = ("VIRTUAL_ENV", "RAY_ADDRESS", "MLFLOW_TRACKING_URI", "PYTHONDONTWRITEBYTECODE")
    variables = {name: value for name, value in os.environ.items() if name not in unset}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    ray = {"RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": scratch}
    temporary = {"TMPDIR": scratch}  # a run that is killed leaves gigabytes of states behind
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "WANDB_MODE": "disabled", "PYTHONPATH": str(ROOT)}
    return variables | threads | ray | temporary | quiet


def _stop(process: subprocess.Popen[bytes], tree: set[Process]) -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOPPING)
    alive = {running for running, _ in processes()}
    for survivor in tree & alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(survivor.pid, signal.SIGKILL)
    if process.poll() is None:
        process.kill()
    process.wait()


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "(none)"
