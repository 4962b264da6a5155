"""The command of the first hour."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

import torch

from benchmarks.circumstances import about
from benchmarks.gpu import __doc__ as description
from benchmarks.gpu.agreement import agreement
from benchmarks.gpu.checks import ask_driver, card, check
from benchmarks.gpu.copies import copies
from benchmarks.gpu.goals import goals
from benchmarks.gpu.groups import groups
from benchmarks.gpu.journal import Journal
from benchmarks.gpu.methods import methods
from benchmarks.gpu.numerics import numerics
from benchmarks.gpu.sharing import bits, pfl
from benchmarks.gpu.steps import DONE, Measure, Options, run, run_in_process

STEPS: dict[str, Measure] = {
    "card": card,
    "check": check,
    "bits": bits,
    "groups": groups,
    "pfl": pfl,
    "numerics": numerics,
    "agreement": agreement,
    "methods": methods,
    "copies": copies,
}
"""The steps, the most valuable first."""


def main(arguments: list[str] | None = None) -> int:
    """Run the steps; return 1 if one failed or was cut off."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="measure as little as shows that every step works")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--minutes", type=float, default=9.0, help="time for all steps (default: %(default)s)")
    parser.add_argument("--json", type=Path, default=Path("gpu.jsonl"), help="the file (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("torch sees no GPU on this machine: --device cpu --quick rehearses.", file=sys.stderr)
        return 2

    journal = Journal(options.json)
    settings = Options(options.device, options.quick)
    # This process opens no CUDA, which would take memory of the card for the whole hour.
    card_name = ask_driver("name") or "a GPU" if options.device == "cuda" else "CPU"
    if any((row["card"], row["quick"]) != (card_name, settings.quick) for row in journal.rows("begin")):
        print(f"{options.json} has numbers of another card; name another file with --json.", file=sys.stderr)
        return 2
    journal.add("begin", {"about": about(), "card": card_name, "quick": settings.quick})

    def start(name: str, seconds: float) -> str:
        outcome = run_in_process(STEPS[name], name, settings, options.json, seconds)
        if outcome != DONE:
            journal.add(name, {"about": outcome})
        # With its step, so that a call that is cut off has said what it knows.
        for goal in goals(journal, name):
            journal.add("goal", {"about": f"{goal} (a rehearsal)" if settings.quick else goal})
        return outcome

    # In the order of their value, however they were named.
    names = [name for name in STEPS if name in options.steps]
    outcomes = run(names, 60 * options.minutes, start)
    left_out = [name for name in names if name not in outcomes]
    for name in left_out:
        journal.add(name, {"about": f"left out: the {options.minutes:g} minutes are over"})
    return int(bool(left_out) or any(outcome != DONE for outcome in outcomes.values()))


if __name__ == "__main__":
    # So that a step's processes end with this one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    raise SystemExit(main())
