"""raypfl's methods beside fluke's, on the same digits: is their accuracy the same?

    python -m benchmarks.parity                        # all methods, 10 seeds
    python -m benchmarks.parity --methods apfl pfedme  # these anew; others stay in the results as they are
    python -m benchmarks.parity --quick                # 2 seeds and 1, of 12 rounds, printed: does it run?
    python -m benchmarks.parity --redraw               # the tables from the results

fluke gets an environment of its own, made by uv and kept in the user's cache, as for `benchmarks.peers`. Both systems
have the same samples at the same clients, the same network, first weights and cohorts, and the same hyperparameters.
They run twice: from many seeds, each with mini-batches of its own, to compare accuracies; and from a few, with raypfl's
mini-batches and in double precision, to compare models.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.parity import report
from benchmarks.parity.data import digits
from benchmarks.parity.jobs import JOBS, ROUNDS, Job, Order, Scores
from benchmarks.parity.systems import raypfl
from benchmarks.peers.data import write
from benchmarks.peers.environments import Unavailable, environment
from benchmarks.peers.report import insert

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "parity.json"
PAGE = ROOT / "docs" / "parity.md"
QUICK_ROUNDS = 12
"""In which every client takes part, as it must for fluke to have a model of it."""
SAME_SEEDS = 3


def main() -> None:
    """Run, write down, and redraw."""
    options = _parser().parse_args()
    path = None if options.quick else RESULTS
    results = json.loads(path.read_text()) if path and path.exists() else {"versions": {}, "runs": []}
    if not options.redraw:
        torch.set_num_threads(1)
        _run(options, results)
        _write(results, path)
    if not results["runs"]:
        sys.exit("There are no results to draw. Run first: python -m benchmarks.parity")
    if options.quick:
        print(report.page(results))
    else:
        PAGE.write_text(insert(PAGE.read_text(), report.page(results), report.BEGIN, report.END))
        print(f"Wrote {PAGE.relative_to(ROOT)}")


def _run(options: argparse.Namespace, results: dict[str, Any]) -> None:
    """Replace the runs of the chosen methods."""
    folder = Path(options.environments).expanduser()
    try:
        environments = {system: environment(system, folder, options.rebuild) for system in ("raypfl", "fluke")}
    except Unavailable as reason:
        sys.exit(f"fluke cannot be compared with: {reason}.")

    results["versions"] = {system: installed.versions for system, installed in environments.items()}
    results["runs"] = [run for run in results["runs"] if run["method"] not in options.methods]

    jobs = [JOBS[name] for name in options.methods]
    rounds = ROUNDS
    seeds = options.seeds
    same_seeds = SAME_SEEDS
    if options.quick:
        rounds = QUICK_ROUNDS
        seeds = 2
        same_seeds = 1
    fluke = environments["fluke"].python
    results["runs"] += both(jobs, range(seeds), False, rounds, fluke)
    results["runs"] += both(jobs, range(same_seeds), True, rounds, fluke)


def both(jobs: Sequence[Job], seeds: Sequence[int], same: bool, rounds: int, python: str) -> list[dict[str, Any]]:
    """The records of raypfl's runs and readings, and of fluke's.

    Parameters
    ----------
    same : see `Order`.
    python : the interpreter of fluke's environment.
    """
    records = []
    orders = []
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        write(digits(), scratch / "samples")
        for job in jobs:
            for seed in seeds:
                scores, cohorts = raypfl.run(job, seed, job.method, same, rounds)
                records += _records(job, seed, report.RAYPFL, same, scores)
                if job.reading:
                    scores_of_reading, _ = raypfl.run(job, seed, job.reading, same, rounds)
                    records += _records(job, seed, report.READING, same, scores_of_reading)
                orders.append(_order(job, seed, same, cohorts, scratch))
            print(f"raypfl, {'the same' if same else 'own'} mini-batches: {job.title}", flush=True)

        for order, scores in zip(orders, _ask_fluke(python, orders, scratch), strict=True):
            records += _records(JOBS[order.method], order.seed, report.FLUKE, same, scores)
    return records


def _order(job: Job, seed: int, same: bool, cohorts: list[list[int]], scratch: Path) -> Order:
    weights = scratch / f"{job.network.replace(':', '-')}-{seed}.pt"
    if not weights.exists():
        raypfl.first_weights(job, seed, same, weights)
    files = {"files": str(scratch / "samples"), "weights": str(weights)}
    return Order(job.method, dict(job.options), job.network, seed, same, **files, cohorts=cohorts)


def _ask_fluke(python: str, orders: list[Order], scratch: Path) -> list[Mapping[str, Scores]]:
    """The scores of fluke's models, run by run."""
    orders_file = scratch / "orders.json"
    scores_file = scratch / "scores.json"
    orders_file.write_text(json.dumps([asdict(order) for order in orders]))

    command = [python, "-m", "benchmarks.parity.systems.fluke", str(orders_file), str(scores_file)]
    result = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode:
        sys.exit(f"fluke failed:\n{result.stdout}")
    return json.loads(scores_file.read_text())


def _records(job: Job, seed: int, system: str, same: bool, scores: Mapping[str, Scores]) -> list[dict[str, Any]]:
    """A record for each model that is compared."""
    run = {"method": job.method, "seed": seed, "system": system, "same": same}
    records = []
    for model in job.models:
        of_model = scores[model]
        records.append(run | {"model": model, "accuracies": of_model["accuracy"], "losses": of_model["loss"]})
    return records


def _write(results: Mapping[str, Any], path: Path | None) -> None:
    """Write the results as JSON with a line for each record."""
    if path is None:
        return
    runs = ",\n  ".join(json.dumps(_rounded(run)) for run in results["runs"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{\n "versions": {json.dumps(results["versions"])},\n "runs": [\n  {runs}\n ]\n}}\n')


def _rounded(run: Mapping[str, Any]) -> dict[str, Any]:
    return dict(run) | {name: [float(f"{value:.12g}") for value in run[name]] for name in ("accuracies", "losses")}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.parity", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    parser.add_argument("--methods", nargs="+", default=list(JOBS), choices=JOBS, help="default: all")
    parser.add_argument("--seeds", type=int, default=10, help="at least 2 (10)")
    parser.add_argument("--quick", action="store_true", help="2 seeds and 1, of 12 rounds; nothing is written down")
    parser.add_argument("--redraw", action="store_true", help="run nothing; the tables from the results")
    parser.add_argument("--rebuild", action="store_true", help="install fluke anew, in its newest version")
    parser.add_argument(
        "--environments",
        default=f"{cache}/raypfl-peers",
        help="folder of fluke's environment (default: in the user's cache)",
    )
    return parser


if __name__ == "__main__":
    main()
