"""CPU time of robust rules over a round's messages, and of encoding and decoding one message with each compressor.

Numbers are normal draws. Each case is timed `REPEATS` times on one core, and the median is printed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch

from benchmarks.circumstances import about
from raypfl.clients.compression.compressors import COMPRESSORS
from raypfl.federation.robustness.rules import AGGREGATIONS

REPEATS = 3


def cpu_seconds(work: Callable[[], object]) -> float:
    """Return the median CPU time of `work`, without its first call."""
    work()
    times = []
    for _ in range(REPEATS):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=100, help="messages that a rule aggregates")
    parser.add_argument("--numbers", type=int, default=1_600_000, help="numbers of a message")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(about())

    rows = torch.randn(arguments.clients, arguments.numbers, generator=torch.Generator().manual_seed(0))
    before = torch.zeros(arguments.numbers)
    print(f"mean: {cpu_seconds(lambda: rows.mean(0)):.2f} s for {arguments.clients} messages")
    for name in AGGREGATIONS:
        rule = AGGREGATIONS.get(name)()
        print(f"{name}: {cpu_seconds(lambda rule=rule: rule.combine(rows, before)):.2f} s")

    update = rows[0].numpy()
    for name in COMPRESSORS:
        compressor = COMPRESSORS.get(name)()

        def both(compressor=compressor) -> None:
            message = compressor.encode(update, np.random.default_rng(0))
            compressor.decode(message, arguments.numbers)

        print(f"{name}: {1000 * cpu_seconds(both):.0f} ms for a message")


if __name__ == "__main__":
    main()
