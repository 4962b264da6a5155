"""CPU time of a sweep whose trials advance together, beside the same sweep on Ray Tune.

    python -m benchmarks.sweep                     # half an hour
    python -m benchmarks.sweep --trials 8 --turns 1
    python -m benchmarks.sweep --asha --turns 1    # trials that are behind are stopped

The recipe `digits` with Ditto: 20 clients, 20 rounds, an evaluation every second round. Each sweep is a command of its
own with a Ray of its own, and all of its processes count, from their first import to their end. The two take turns,
and must end with the same table. With `concurrent`, a sweep runs on Ray Tune.

ASHA compares a trial with those that reported before it, so that the two sweeps stop other trials. Their rounds, of all
trials together, are printed too.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import yaml

SWEEP = {
    "recipe": "digits",
    "experiment": {
        "method": "ditto",
        "rounds": 20,
        "data": {"name": "digits", "val_fraction": 0.2},
        "evaluation": {"every": 2},
    },
    "search": {"method.lam": {"loguniform": [0.001, 10]}, "training.lr": {"loguniform": [0.01, 0.3]}},
}

PARTS = ("driver", "trials", "Ray")

TRIALS = ("ray::carry_out_task", "ray::ImplicitFunc")
"""Titles of processes that carry out trials."""

POLL = 0.2
"""Seconds between looks at the processes; what one computes after the last look before its end is not counted."""


def cpu_seconds(command: list[str]) -> dict[str, float]:
    """Run a command; return the CPU seconds of its first process, of those of the trials, and of Ray's others."""
    seconds: dict[int, float] = {}
    computing: set[int] = set()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as driver:
        while driver.poll() is None:
            # A process may end between being listed and being asked.
            with contextlib.suppress(psutil.Error):
                root = psutil.Process(driver.pid)
                for process in [root, *root.children(recursive=True)]:
                    with contextlib.suppress(psutil.Error):
                        times = process.cpu_times()
                        seconds[process.pid] = times.user + times.system
                        title = "".join(process.cmdline()[:1])
                        if title.startswith(TRIALS):
                            computing.add(process.pid)
            time.sleep(POLL)
    if driver.returncode:
        sys.exit(f"{' '.join(command)} ended with {driver.returncode}")

    parts = dict.fromkeys(PARTS, 0.0)
    for pid, spent in seconds.items():
        if pid == driver.pid:
            parts["driver"] += spent
        elif pid in computing:
            parts["trials"] += spent
        else:
            parts["Ray"] += spent
    return parts


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=32)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--asha", action="store_true", help="with ASHA, of which every trial gets four rounds")
    parser.add_argument("--mlflow", action="store_true", help="record the trials in MLflow, as is the default")
    arguments = parser.parse_args()

    ways = {"Ray Tune": [f"concurrent={os.cpu_count()}"], "without": []}
    totals: dict[str, list[float]] = {way: [] for way in ways}
    print(f"{'CPU s':>10}" + "".join(f"{part:>9}" for part in (*PARTS, "all", "rounds")))
    scheduler = {"name": "asha", "grace": 4} if arguments.asha else "none"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "rates.yaml").write_text(yaml.safe_dump(SWEEP | {"scheduler": scheduler}))
        for turn in range(arguments.turns):
            tables = []
            for way, changes in ways.items():
                output = folder / f"{turn}-{len(changes)}"
                settings = [f"trials={arguments.trials}", f"output={output}", f"data.cache={folder}/cache"]
                tracking = f"tracking.uri=sqlite:///{output}.db" if arguments.mlflow else "tracking.mlflow=false"
                settings += [tracking, *changes]
                command = [sys.executable, "-m", "raypfl", "tune", str(folder / "rates.yaml"), "--quiet", *settings]
                parts = cpu_seconds(command)
                total = sum(parts.values())
                totals[way].append(total)
                table = list(csv.DictReader((output / "rates/trials.csv").open()))
                tables.append(table)
                rounds = sum(int(trial["round"]) for trial in table)
                spent = "".join(f"{spent:>9.1f}" for spent in (*parts.values(), total))
                print(f"{way:>10}{spent}{rounds:>9}", flush=True)
            assert arguments.asha or tables[0] == tables[1], "the two sweeps have different tables"

    ratios = [before / after for before, after in zip(totals["Ray Tune"], totals["without"], strict=True)]
    print(f"times as much on Ray Tune: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
