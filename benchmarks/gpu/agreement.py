"""Does every method compute what it computes on a CPU? Two rounds of each, with a small network."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.gpu.isolation import Isolated, in_a_line
from benchmarks.gpu.journal import Row
from benchmarks.gpu.steps import Options
from benchmarks.gpu.work import Job, Rounds, relative_difference
from raypfl.methods import METHODS

TOLERANCE = 1e-2
"""Largest relative difference between all that server and clients keep, in fp32; rounding grows over two rounds."""

JOB = Job("lenet", cohort=3, clients=4, samples=8, batch=4, pool=16)

_IMAGES: dict[str, Any] = {"window": 1, "outer_steps": 2, "inner_steps": 2, "per_class": 1}
OPTIONS: dict[str, dict[str, Any]] = {
    "creff": {"feature_steps": 2, "head_steps": 2},
    "feddf": {"steps": 2},
    "perada": {"steps": 2},
    "extra-images": _IMAGES,
    "fedptr": _IMAGES,
    "fedptr-s": _IMAGES,
}
"""With these options a method is quick, and does all that it does within two rounds."""

QUICK = ("fedavg", "fednh", "perada")


def agreement(options: Options) -> Iterator[Row]:
    """Compare what every method keeps after two rounds with what it keeps on a CPU, in several processes."""
    names = QUICK if options.quick else tuple(METHODS)
    lanes = max(1, options.processes[-1] // 2)
    isolated = [Isolated() for _ in range(lanes)]

    def lane(number: int) -> list[Row]:
        return [isolated[number](compared_with_cpu, name, options.device) for name in names[number::lanes]]

    with ThreadPoolExecutor(lanes) as threads:
        for rows in threads.map(lane, range(lanes)):
            yield from rows


def compared_with_cpu(name: str, device: str) -> Row:
    """Compare a method's rounds on the device with those on the CPU, and with themselves."""
    row: Row = {"method": name}
    try:
        expected, kept, again = (_kept(name, where) for where in ("cpu", device, device))
        difference = relative_difference(kept, expected)
        row |= {"difference": difference, "right": difference <= TOLERANCE, "same_bits": bool(kept.equal(again))}
    except Exception as error:
        row |= {"right": False, "error": in_a_line(error)}
    return row


def _kept(name: str, device: str) -> Any:
    rounds = Rounds(JOB, device, METHODS.get(name)(**OPTIONS.get(name, {})))
    for _ in range(2):
        rounds.run()
    return rounds.kept()
