"""raypfl's methods beside fluke's, on the same digits: is their accuracy the same?

    python -m benchmarks.parity                        # all methods, 10 seeds
    python -m benchmarks.parity --methods apfl pfedme  # these anew; others stay in the results as they are
    python -m benchmarks.parity --quick                # 2 seeds of 12 rounds, printed: does it run?
    python -m benchmarks.parity --redraw               # the tables from the results

fluke gets an environment of its own, made by uv and kept in the user's cache, as for `benchmarks.peers`. Both systems
have the same samples at the same clients, the same network, first weights and cohorts, and the same hyperparameters.
fluke runs twice: with mini-batches of its own, for the comparison of accuracies, and with raypfl's, for that of models.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.parity import report
from benchmarks.parity.data import digits
from benchmarks.parity.jobs import BATCH, EPOCHS, JOBS, LR, ROUNDS, Job
from benchmarks.parity.order import Order, Scores
from benchmarks.parity.systems import raypfl
from benchmarks.peers.data import write
from benchmarks.peers.environments import Unavailable, environment
from benchmarks.peers.report import insert

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "parity.json"
PAGE = ROOT / "docs" / "parity.md"


def main() -> None:
    """Run, write down, and redraw."""
    given = _parser().parse_args()
    path = None if given.quick else RESULTS
    results = json.loads(path.read_text()) if path and path.exists() else {"versions": {}, "runs": []}
    if not given.redraw:
        torch.set_num_threads(1)
        _run(given, results)
        _write(results, path)
    if not results["runs"]:
        sys.exit("There are no results to draw. Run first: python -m benchmarks.parity")
    if given.quick:
        print(report.page(results))
    else:
        PAGE.write_text(insert(PAGE.read_text(), report.page(results), report.BEGIN, report.END))
        print(f"Wrote {PAGE.relative_to(ROOT)}")


def _run(given: argparse.Namespace, results: dict[str, Any]) -> None:
    """Replace the runs of the given methods."""
    folder = Path(given.environments).expanduser()
    try:
        found = {system: environment(system, folder, given.rebuild) for system in ("raypfl", "fluke")}
    except Unavailable as why:
        sys.exit(f"fluke cannot be compared with: {why}.")
    results["versions"] = {system: each.versions for system, each in found.items()}
    rounds, seeds = (12, 2) if given.quick else (ROUNDS, given.seeds)
    results["runs"] = [run for run in results["runs"] if run["method"] not in given.methods]
    with tempfile.TemporaryDirectory() as scratch:
        write(digits(), Path(scratch) / "samples")
        orders: list[Order] = []
        for job in (JOBS[name] for name in given.methods):
            for seed in range(seeds):
                scores, cohorts = raypfl.run(job, seed, job.method, rounds)
                results["runs"] += _records(job, seed, report.RAYPFL, scores)
                if job.reading:
                    results["runs"] += _records(
                        job, seed, report.READING, raypfl.run(job, seed, job.reading, rounds)[0]
                    )
                orders += _orders(job, seed, cohorts, Path(scratch))
            print(f"raypfl: {job.title}", flush=True)
        for order, scores in zip(orders, _ask_fluke(found["fluke"].python, orders, Path(scratch)), strict=True):
            system = report.SAME if order.same_batches else report.FLUKE
            results["runs"] += _records(JOBS[order.method], order.seed, system, scores)


def _orders(job: Job, seed: int, cohorts: list[list[int]], scratch: Path) -> list[Order]:
    weights = scratch / f"{job.network.replace(':', '-')}-{seed}.pt"
    if not weights.exists():
        raypfl.first_weights(job, seed, weights)
    return [
        Order(
            method=job.method,
            options=dict(job.options),
            network=job.network,
            seed=seed,
            same_batches=same_batches,
            files=str(scratch / "samples"),
            weights=str(weights),
            cohorts=cohorts,
            batch=BATCH,
            lr=LR,
            epochs=EPOCHS,
        )
        for same_batches in (False, True)
    ]


def _ask_fluke(python: str, orders: list[Order], scratch: Path) -> list[Mapping[str, Scores]]:
    """The scores of its models, run by run."""
    given, answer = scratch / "orders.json", scratch / "scores.json"
    given.write_text(json.dumps([asdict(order) for order in orders]))
    command = [python, "-m", "benchmarks.parity.systems.fluke", str(given), str(answer)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"fluke failed:\n{done.stdout}")
    return json.loads(answer.read_text())


def _records(job: Job, seed: int, system: str, scores: Mapping[str, Scores]) -> list[dict[str, Any]]:
    """A record for each model that is judged."""
    about = {"method": job.method, "seed": seed, "system": system}
    return [about | {"model": m, "accuracies": scores[m]["accuracy"], "losses": scores[m]["loss"]} for m in job.models]


def _write(results: Mapping[str, Any], path: Path | None) -> None:
    """As JSON with a line for each record."""
    if path is None:
        return
    runs = ",\n  ".join(json.dumps(_rounded(run)) for run in results["runs"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{\n "versions": {json.dumps(results["versions"])},\n "runs": [\n  {runs}\n ]\n}}\n')


def _rounded(run: Mapping[str, Any]) -> dict[str, Any]:
    return dict(run) | {name: [float(f"{value:.8g}") for value in run[name]] for name in ("accuracies", "losses")}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.parity", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    parser.add_argument("--methods", nargs="+", default=list(JOBS), choices=JOBS, help="default: all")
    parser.add_argument("--seeds", type=int, default=10, help="at least 2 (10)")
    parser.add_argument("--quick", action="store_true", help="2 seeds of 12 rounds; nothing is written down")
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
