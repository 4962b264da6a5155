"""What would actors on one card save if they shared tensors on it (CUDA IPC), instead of copying each its own?"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing
from torch import Tensor

from benchmarks.gpu.journal import Row
from benchmarks.gpu.steps import Options
from benchmarks.gpu.work import wait

TENSORS = {
    "data set, 50,000 images": (50_000, 3_072, torch.uint8),
    "frozen base, 11 M parameters": (11_000, 1_024, torch.float32),
    "broadcast, 1.6 M parameters": (1_600, 1_024, torch.float32),
}
"""Rows, columns and dtype of what all actors on a card have."""

TRIES = 3


def copies(options: Options) -> Iterator[Row]:
    """Seconds until another process can compute with a tensor, and the bytes of the card that this takes."""
    context = torch.multiprocessing.get_context("spawn")
    requests = context.Queue()
    answers = context.Queue()
    process = context.Process(target=_receive, args=(options.device, requests, answers))
    process.start()
    answers.get()
    with tempfile.TemporaryDirectory() as folder:
        for name, (rows, columns, dtype) in TENSORS.items():
            if options.quick:
                rows //= 100
                name = f"a hundredth of: {name}"
            host = torch.arange(rows * columns).remainder(251).reshape(rows, columns).to(dtype)
            file = Path(folder) / "tensor.npy"
            np.save(file, host.numpy())
            on_card = host.to(options.device)
            wait(options.device)

            row: Row = {"about": name, "mib": host.nbytes / 2**20}
            # A mapped file is what Ray's store and raypfl's give an actor; the page cache has it.
            expected = host.sum(dtype=torch.float64).item()
            for way, message in (("copied", str(file)), ("shared", on_card)):
                tries = [_sent(message, expected, options.device, requests, answers) for _ in range(TRIES)]
                row[f"{way}_milliseconds"] = 1000 * min(seconds for seconds, _ in tries)
                _, card_bytes = tries[-1]
                if card_bytes is not None:
                    row[f"{way}_card_mib"] = card_bytes / 2**20
            yield row
            del on_card
    requests.put("end")
    process.join()


def _sent(message: str | Tensor, expected: float, device: str, requests: Any, answers: Any) -> tuple[float, int | None]:
    """Send a tensor, or a file with it; return the seconds until its sum comes back, and the bytes that it takes."""
    before = _free_bytes(device)
    start = time.perf_counter()
    requests.put(message)
    total = answers.get()
    seconds = time.perf_counter() - start
    card_bytes = None if before is None else before - _free_bytes(device)

    requests.put(None)
    answers.get()
    if total != expected:
        raise RuntimeError(f"The other process read something else: {total}.")
    return seconds, card_bytes


def _receive(device: str, requests: Any, answers: Any) -> None:
    """Take tensors, or files with them, to the device; answer with their sums, so that they have been read."""
    torch.zeros(1, device=device)
    answers.put("ready")
    tensor: Tensor | None = None
    while True:
        message = requests.get()
        if message is None:
            tensor = None
            if device == "cuda":
                torch.cuda.empty_cache()
            answers.put("dropped")
            continue
        if isinstance(message, str):
            if message == "end":
                return
            tensor = torch.from_numpy(np.array(np.load(message, mmap_mode="r"))).to(device)
        else:
            tensor = message
        del message
        answers.put(tensor.sum(dtype=torch.float64).item())


def _free_bytes(device: str) -> int | None:
    return torch.cuda.mem_get_info()[0] if device == "cuda" else None
