"""Does every method compute what it computes on a CPU? Two rounds of each, with a small network."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import Queue
from typing import Any

import torch

from benchmarks.gpu.isolation import Isolated, in_a_line
from benchmarks.gpu.journal import Row
from benchmarks.gpu.steps import Options
from benchmarks.gpu.work import Job, Rounds, recorders, relative_difference
from raypfl.learning.recording import Recorder
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
    lanes = options.processes[-1]
    free: Queue[Isolated] = Queue()
    for _ in range(lanes):
        free.put(Isolated())

    def row_of(name: str) -> Row:
        isolated = free.get()
        try:
            return isolated(compared_with_cpu, name, options.device)
        finally:
            free.put(isolated)

    with ThreadPoolExecutor(lanes) as threads:
        yield from threads.map(row_of, names)
    for _ in range(lanes):
        free.get().close()


def compared_with_cpu(name: str, device: str) -> Row:
    """Compare a method's rounds on the device with those on the CPU, with themselves, and with recorded steps."""
    row: Row = {"method": name}
    torch.set_num_threads(1)
    try:
        expected, result, again = (_kept(name, where) for where in ("cpu", device, device))
        difference = relative_difference(result, expected)
        row |= {"difference": difference, "right": difference <= TOLERANCE, "same_bits": bool(result.equal(again))}
        longer = replace(JOB, samples=8 * JOB.batch)
        one_by_one = _kept(name, device, longer)
        for way, recorder in recorders(device).items():
            row[f"same_bits_with_{way}"] = bool(_kept(name, device, longer, recorder()).equal(one_by_one))
    except Exception as error:
        row |= {"right": False, "error": in_a_line(error)}
    return row


def _kept(name: str, device: str, job: Job = JOB, recorder: Recorder | None = None) -> torch.Tensor:
    rounds = Rounds(job, device, METHODS.get(name)(**OPTIONS.get(name, {})), recorder=recorder)
    for _ in range(2):
        rounds.run()
    return rounds.kept()
