"""raypfl beside what researchers use today: the same jobs, in one run, on the same machine.

    python -m benchmarks.peers                         # all jobs, 3 repeats: over an hour
    python -m benchmarks.peers --quick                 # a few minutes, rough
    python -m benchmarks.peers --jobs cnn mlp          # these anew; others stay in the results as they are
    python -m benchmarks.peers --go-on                 # what is missing in the results
    python -m benchmarks.peers --redraw                # table and picture from the results

Every system gets an environment of its own, made by uv and kept in the user's cache; it has the same torch, the same
network, the same samples dealt out to the same clients, and does the same local steps. A run starts afresh, with one
torch thread a process. It is watched from outside and stopped when enough rounds are counted: those that begin two
seconds or more after the first one ended. Contenders take turns, so that a busy machine is busy for all. Results are
written after every run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.circumstances import circumstances
from benchmarks.peers import report
from benchmarks.peers.data import prepare
from benchmarks.peers.environments import Environment, Unavailable, compile_modules, environment
from benchmarks.peers.jobs import CONTENDERS, JOBS, Contender, Job
from benchmarks.peers.measure import ROOT, Patience, Run, measure

RESULTS = ROOT / "benchmarks" / "results" / "peers.json"
PAGE, README = ROOT / "docs" / "performance.md", ROOT / "README.md"
PICTURE = ROOT / "docs" / "performance" / "peers.png"
SYSTEMS = tuple(dict.fromkeys(contender.system for contender in CONTENDERS))
QUICK_JOBS = ("cnn", "mlp", "lenet")
QUICK_COHORT = 10


def main() -> None:
    """Measure, write down, and redraw."""
    given = _parser().parse_args()
    path = given.json or (None if given.quick else RESULTS)
    results = _read(path)
    if not given.redraw:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("Stopped; --go-on measures what is missing."))
        _measure(given, results, path)
    if not results["runs"]:
        sys.exit("There are no results to draw. Measure first: python -m benchmarks.peers")
    if path != RESULTS:
        print(report.page(results))
    else:
        report.draw(results, PICTURE)
        PAGE.write_text(report.insert(PAGE.read_text(), report.page(results)))
        README.write_text(report.insert(README.read_text(), report.summary(results)))
        print(f"Wrote {', '.join(str(file.relative_to(ROOT)) for file in (PAGE, README, PICTURE))}")


def _measure(given: argparse.Namespace, results: dict[str, Any], path: Path | None) -> None:
    """Add runs to the results, which are written down after each."""
    jobs = [JOBS[name] for name in given.jobs or (QUICK_JOBS if given.quick else JOBS)]
    environments = _environments(given, results)
    results["machine"] = machine()
    for contender in CONTENDERS:
        if not is_possible(contender):
            needs = " or ".join(contender.needs)
            results["left_out"][contender.name] = f"{contender.name}, because this CPU has no {needs}."
    if not given.go_on:
        again = {(job.name, c.name) for job in jobs for c in job.contenders if c.system in environments}
        results["runs"] = [run for run in results["runs"] if (run["job"], run["contender"]) not in again]
    folder = Path(given.environments).expanduser() / "samples"
    folder.mkdir(parents=True, exist_ok=True)
    repeats = given.repeats or (1 if given.quick else 3)
    for repeat, job, contender in missing(results["runs"], jobs, tuple(environments), repeats):
        found = environments[contender.system]
        begun = circumstances()
        with tempfile.TemporaryDirectory() as scratch:
            run = _one(job, contender, found, folder, Path(scratch), given.quick)
        record = {"job": job.name, "contender": contender.name, "repeat": repeat, "versions": found.versions}
        results["runs"].append(record | begun | dataclasses.asdict(run))
        _write(results, path)
        row = report.summarise(results["runs"][-1:])[job.name][contender.name]
        print(repeat, job.name, report.cells(contender.name, row), run.problem or "", flush=True)


def missing(
    runs: list[dict[str, Any]], jobs: list[Job], systems: tuple[str, ...], repeats: int
) -> Iterator[tuple[int, Job, Contender]]:
    """The runs that are not there yet, contenders taking turns."""
    done = {(run["job"], run["contender"], run["repeat"]) for run in runs}
    for repeat in range(repeats):
        for job in jobs:
            for contender in job.contenders:
                wanted = contender.system in systems and is_possible(contender)
                if wanted and (job.name, contender.name, repeat) not in done:
                    yield repeat, job, contender


def is_possible(contender: Contender) -> bool:
    """Whether this CPU has what a contender needs."""
    return not contender.needs or bool(set(contender.needs) & _flags())


def machine() -> dict[str, Any]:
    """The machine that is measured, without its name."""
    models = [line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / report.GIB
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory, 1),
        "system": platform.system(),
        "bf16": sorted({"avx512_bf16", "amx_bf16", "bf16"} & _flags()),
    }


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def _flags() -> set[str]:
    return {flag for line in _cpuinfo() if line.startswith(("flags", "Features")) for flag in line.split()}


def _environments(given: argparse.Namespace, results: dict[str, Any]) -> dict[str, Environment]:
    found = {}
    for system in given.systems:
        try:
            found[system] = environment(system, Path(given.environments).expanduser(), given.rebuild)
        except Unavailable as why:
            results["left_out"][system] = f"{system}, because {why}."
            print(f"Left out: {results['left_out'][system]}", flush=True)
        else:
            results["left_out"].pop(system, None)
            results["versions"][system] = found[system].versions
            compile_modules(found[system].python, ROOT / "raypfl", ROOT / "benchmarks")
    return found


def _one(job: Job, contender: Contender, found: Environment, folder: Path, scratch: Path, quick: bool) -> Run:
    source, files = prepare(job.noise, folder)
    cohort = min(job.cohort, QUICK_COHORT) if quick and job.method != "evaluation" else job.cohort
    report_file, order = scratch / "report", scratch / "order.json"
    job.order(contender, source, files, report_file, cohort).write(order)
    patience = Patience(settle=1.0, rounds=1, seconds=1.0, limit=60.0) if quick else Patience(rounds=job.rounds)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={contender.processes}"]
    start = [found.python, *(launcher if contender.by_torchrun else []), "-m", "benchmarks.peers.contender"]
    return measure([*start, contender.system, str(order)], report_file, patience)


def _read(path: Path | None) -> dict[str, Any]:
    if path and path.exists():
        return json.loads(path.read_text())
    return {"machine": {}, "versions": {}, "left_out": {}, "runs": []}


def _write(results: Mapping[str, Any], path: Path | None) -> None:
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(results, indent=1) + "\n")
    beside.replace(path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    parser.add_argument("--jobs", nargs="+", choices=JOBS, help="default: all")
    parser.add_argument("--systems", nargs="+", default=SYSTEMS, choices=SYSTEMS, help="default: all")
    parser.add_argument("--repeats", type=int, help="runs of every contender at every job (3; quick: 1)")
    parser.add_argument("--quick", action="store_true", help="cohorts of 10, and a round each: rough")
    parser.add_argument("--go-on", action="store_true", help="keep the runs that the results have")
    parser.add_argument("--redraw", action="store_true", help="measure nothing; table and picture from the results")
    parser.add_argument("--rebuild", action="store_true", help="install the systems anew, in their newest versions")
    parser.add_argument(
        "--json",
        type=Path,
        help="results in another file than benchmarks/results/peers.json, or with --quick in one: printed, not drawn",
    )
    parser.add_argument(
        "--environments",
        default=f"{cache}/raypfl-peers",
        help="folder of the systems' environments and the samples, 10 GB (default: in the user's cache)",
    )
    return parser


if __name__ == "__main__":
    main()
