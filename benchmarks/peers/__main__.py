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
    options = _parser().parse_args()
    path = options.json or (None if options.quick else RESULTS)
    results = _read(path)
    if not options.redraw:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("Stopped; --go-on measures what is missing."))
        _measure(options, results, path)
    if not results["runs"]:
        sys.exit("There are no results to draw. Measure first: python -m benchmarks.peers")
    if path != RESULTS:
        print(report.page(results))
    else:
        report.draw(results, PICTURE)
        PAGE.write_text(report.insert(PAGE.read_text(), report.page(results)))
        README.write_text(report.insert(README.read_text(), report.summary(results)))
        print(f"Wrote {', '.join(str(file.relative_to(ROOT)) for file in (PAGE, README, PICTURE))}")


def _measure(options: argparse.Namespace, results: dict[str, Any], path: Path | None) -> None:
    """Add runs to the results, which are written down after each."""
    jobs = [JOBS[name] for name in options.jobs or (QUICK_JOBS if options.quick else JOBS)]
    environments = _environments(options, results)
    results["machine"] = machine()
    for contender in CONTENDERS:
        if not is_possible(contender):
            needs = " or ".join(contender.needs)
            results["left_out"][contender.name] = f"{contender.name}, because this CPU has no {needs}."

    if not options.go_on:
        replaced = set()
        for job in jobs:
            replaced.update((job.name, c.name) for c in job.contenders if c.system in environments)
        results["runs"] = [run for run in results["runs"] if (run["job"], run["contender"]) not in replaced]

    folder = Path(options.environments).expanduser() / "samples"
    folder.mkdir(parents=True, exist_ok=True)
    repeats = options.repeats or (1 if options.quick else 3)
    for repeat, job, contender in missing(results["runs"], jobs, tuple(environments), repeats):
        environment_of_system = environments[contender.system]
        origin = circumstances()
        with tempfile.TemporaryDirectory() as scratch:
            run = _run_contender(job, contender, environment_of_system, folder, Path(scratch), options.quick)
        record = {
            "job": job.name,
            "contender": contender.name,
            "repeat": repeat,
            "versions": environment_of_system.versions,
        }
        results["runs"].append(record | origin | dataclasses.asdict(run))
        _write(results, path)
        row = report.summarise(results["runs"][-1:])[job.name][contender.name]
        print(repeat, job.name, report.cells(contender.name, row), run.problem or "", flush=True)


def missing(
    runs: list[dict[str, Any]], jobs: list[Job], systems: tuple[str, ...], repeats: int
) -> Iterator[tuple[int, Job, Contender]]:
    """The runs that the results lack, contenders taking turns."""
    measured = {(run["job"], run["contender"], run["repeat"]) for run in runs}
    for repeat in range(repeats):
        for job in jobs:
            for contender in job.contenders:
                can_run = contender.system in systems and is_possible(contender)
                if can_run and (job.name, contender.name, repeat) not in measured:
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


def _environments(options: argparse.Namespace, results: dict[str, Any]) -> dict[str, Environment]:
    environments = {}
    for system in options.systems:
        try:
            environments[system] = environment(system, Path(options.environments).expanduser(), options.rebuild)
        except Unavailable as reason:
            results["left_out"][system] = f"{system}, because {reason}."
            print(f"Left out: {results['left_out'][system]}", flush=True)
        else:
            results["left_out"].pop(system, None)
            results["versions"][system] = environments[system].versions
            compile_modules(environments[system].python, ROOT / "raypfl", ROOT / "benchmarks")
    return environments


def _run_contender(
    job: Job, contender: Contender, environment: Environment, folder: Path, scratch: Path, quick: bool
) -> Run:
    """Run a job with a contender in its environment, with samples in `folder`."""
    source, files = prepare(job.noise, folder)
    cohort = job.cohort
    patience = Patience(rounds=job.rounds)
    if quick:
        patience = Patience(settle=1.0, rounds=1, seconds=1.0, limit=60.0)
        if job.method != "evaluation":  # which evaluates every client, whatever the cohort
            cohort = min(job.cohort, QUICK_COHORT)

    report_file = scratch / "report"
    order = scratch / "order.json"
    job.order(contender, source, files, report_file, cohort).write(order)

    command = [environment.python]
    if contender.by_torchrun:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={contender.processes}"]
    command += ["-m", "benchmarks.peers.contender", contender.system, str(order)]
    return measure(command, report_file, patience)


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
