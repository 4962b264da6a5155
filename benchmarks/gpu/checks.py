"""Is the card right? What it is, one step of every network and optimizer against the CPU, and equal bits."""

from __future__ import annotations

import contextlib
import hashlib
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, vmap
from torch.nn import functional as F

from benchmarks.circumstances import about
from benchmarks.gpu.isolation import Isolated, in_a_line
from benchmarks.gpu.journal import Row
from benchmarks.gpu.steps import Options
from benchmarks.gpu.work import Job, Rounds, recorders, relative_difference
from raypfl.engine.building.devices import mps_runs, same_bits_on_gpus
from raypfl.learning.executor import Precision
from raypfl.learning.optimizers import OPTIMIZERS, LocalOptimizer

TOLERANCE = 1e-3
"""Largest relative difference between the updates of a card and of the CPU, in fp32."""

TOLERANCE_OF_SIGNS = 2e-2
"""The same for optimizers: Adam's first step is nearly the sign of the gradient, which rounding may turn around."""

TOKENS = Job("gru", (12,), kind="tokens", classes=20)
TEXTS = Job("fasttext", (12,), options={"num_tokens": 20})

NETWORKS = {
    "mlp": Job("mlp", (1, 28, 28)),
    "lenet": Job("lenet"),
    "cnn": Job("cnn"),
    "fedavg_cnn": Job("fedavg_cnn"),
    "conv2cifar": Job("conv2cifar"),
    "convnet": Job("convnet"),
    "resnet10": Job("resnet10"),
    "resnet18": Job("resnet18", options={"norm": "group"}),
    "resnet34": Job("resnet34", options={"norm": "group"}),
    "resnet56": Job("resnet56"),
    "vit_s_16": Job("vit_s_16", options={"size": 32, "patch": 8, "depth": 2}),
    "two_layer": Job("two_layer", (8,), kind="numbers", classes=1),
    "causal_cnn": replace(TOKENS, network="causal_cnn"),
    "gru": TOKENS,
    "causal_transformer": replace(TOKENS, network="causal_transformer"),
    "fasttext": TEXTS,
    "text_cnn": replace(TEXTS, network="text_cnn"),
    "text_transformer": replace(TEXTS, network="text_transformer"),
}
"""Every built-in network, in the order in which they matter. Batch norm of so few samples makes deep ones unstable."""

QUICK = ("mlp", "lenet", "gru")

SMALL: dict[str, Any] = {"cohort": 2, "samples": 4, "batch": 4}
"""A round of one step."""

RECORDED = ("mlp", "lenet", "cnn", "resnet10", "causal_transformer", "text_cnn")
RECORDED_SIZE: dict[str, Any] = {"cohort": 3, "samples": 40, "batch": 4}
"""Networks whose recorded steps are compared, and their jobs: ten steps."""

WAYS = {
    "together": ("vectorised", Precision()),
    "one by one": ("sequential", Precision()),
    "one by one, channels last": ("sequential", Precision(channels_last=True)),
}


def card(options: Options) -> Iterator[Row]:
    """What the card is, and what this process takes of it."""
    yield {"about": about(), "device": options.device}
    if options.device != "cuda":
        return

    used_by_others = ask_driver("memory.used")
    start = time.perf_counter()
    # With the kernels that every run loads.
    (torch.randn(64, 64, device="cuda") @ torch.randn(64, 64, device="cuda")).sum().item()
    F.conv2d(torch.randn(2, 3, 8, 8, device="cuda"), torch.randn(4, 3, 3, 3, device="cuda")).sum().item()
    seconds = time.perf_counter() - start

    properties = torch.cuda.get_device_properties(0)
    row: Row = {
        "name": properties.name,
        "driver": ask_driver("driver_version") or "unknown",
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),
        "gib": properties.total_memory / 2**30,
        "multiprocessors": properties.multi_processor_count,
        "mps": mps_runs(),
        "opens_in_seconds": seconds,
    }
    if used_by_others is not None:
        free, total = torch.cuda.mem_get_info()
        context = total - free - torch.cuda.memory_reserved()
        row["context_mib"] = context / 2**20 - float(used_by_others)
    yield row


def ask_driver(field: str) -> str | None:
    """A field of the first card, which opens no CUDA; None if nvidia-smi is missing."""
    query = ["nvidia-smi", "-i", "0", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    return None


def check(options: Options) -> Iterator[Row]:
    """Compare an update of each network and optimizer with the CPU's, and with itself."""
    isolated = Isolated()
    for name, job in NETWORKS.items():
        if options.quick and name not in QUICK:
            continue
        for way, (_, precision) in WAYS.items():
            if not precision.channels_last or job.shape[0] == 3:
                yield isolated(compared, name, replace(job, **SMALL), way, options)
    for name in OPTIMIZERS:
        for way in ("together", "one by one"):
            yield isolated(compared, "lenet", replace(NETWORKS["lenet"], **SMALL), way, options, name)
    for name in QUICK if options.quick else RECORDED:
        for way in recorders(options.device):
            yield isolated(recorded, name, replace(NETWORKS[name], **RECORDED_SIZE), way, options)
    for name in OPERATIONS:
        yield isolated(checked_operation, name, options.device)
    isolated.close()


def compared(network: str, job: Job, way: str, options: Options, optimizer_name: str | None = None) -> Row:
    """Compare an update on the device with the CPU's, and with itself."""
    row: Row = {"network": network} if optimizer_name is None else {"optimizer": optimizer_name}
    row["way"] = way
    torch.set_warn_always(True)
    executor, precision = WAYS[way]
    try:
        optimizer = None if optimizer_name is None else OPTIMIZERS.get(optimizer_name)()
        expected, _ = _update(job, "cpu", Precision(), optimizer)
        job = replace(job, executor=executor)
        update, notes = _update(job, options.device, precision, optimizer)
        again, _ = _update(job, options.device, precision, optimizer)
        difference = relative_difference(update, expected)
        tolerance = TOLERANCE if optimizer is None else TOLERANCE_OF_SIGNS
        row |= {"difference": difference, "right": difference <= tolerance, "same_bits": bool(update.equal(again))}
        if notes:
            row["warned"] = notes
    except Exception as error:
        # What fails here is what this step is for.
        row |= {"right": False, "error": in_a_line(error)}
    return row


def recorded(network: str, job: Job, way: str, options: Options) -> Row:
    """Compare the bits of models that were trained with recorded steps and without."""
    row: Row = {"network": network, "way": way}
    recorder = recorders(options.device)[way]
    try:
        hashes = set()
        for rounds in (Rounds(job, options.device), Rounds(job, options.device, recorder=recorder())):
            for _ in range(3):
                rounds.run()
            hashes.add(rounds.hash())
        row["same_bits"] = len(hashes) == 1
        if rounds.warnings:
            row["warned"] = sorted(rounds.warnings)
    except Exception as error:
        row |= {"same_bits": False, "error": in_a_line(error)}
    return row


def _update(job: Job, device: str, precision: Precision, optimizer: LocalOptimizer | None) -> tuple[Tensor, list[str]]:
    """The server's update in one round of one step, on the CPU; and what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rounds = Rounds(job, device, precision=precision, optimizer=optimizer)
        before = rounds.server["theta"].clone()
        rounds.run()
        update = (rounds.server["theta"] - before).cpu()
    texts = rounds.warnings | {str(warning.message) for warning in caught}
    return update, sorted({text.splitlines()[0][:160] for text in texts})


# --- operations -------------------------------------------------------------------------------------------------------


def _max_pool(layout: torch.memory_format) -> Callable[[str], Tensor]:
    def run(device: str) -> Tensor:
        x = torch.randn(16, 32, 28, 28).to(device).contiguous(memory_format=layout).requires_grad_()
        (F.max_pool2d(x, 3, stride=2, padding=1) * 1.7).square().sum().backward()
        assert x.grad is not None
        return x.grad

    return run


def _scatter_add(device: str) -> Tensor:
    columns = torch.randint(0, 15, (8, 4096)).to(device)
    return torch.zeros(8, 15, device=device).scatter_add_(1, columns, torch.rand(8, 4096).to(device))


def _index_put(device: str) -> Tensor:
    rows = torch.randint(0, 8, (4096,)).to(device)
    return torch.zeros(8, device=device).index_put_((rows,), torch.rand(4096).to(device), accumulate=True)


def _grouped_convolution(device: str) -> Tensor:
    weights = torch.randn(20, 16, 8, 3, 3).to(device).requires_grad_()
    x = torch.randn(20, 10, 8, 16, 16).to(device)
    vmap(F.conv2d)(x, weights).square().sum().backward()
    assert weights.grad is not None
    return weights.grad


def _embedding(device: str) -> Tensor:
    weights = torch.randn(20, 50, 32).to(device).requires_grad_()
    tokens = torch.randint(0, 50, (20, 256)).to(device)
    vmap(F.embedding)(tokens, weights).square().sum().backward()
    assert weights.grad is not None
    return weights.grad


OPERATIONS: dict[str, Callable[[str], Tensor]] = {
    "max-pool backward": _max_pool(torch.contiguous_format),
    "max-pool backward, channels last": _max_pool(torch.channels_last),
    "scatter_add_, as in metrics": _scatter_add,
    "index_put_ that adds, as in metrics": _index_put,
    "grouped convolution, as under vmap": _grouped_convolution,
    "embedding backward under vmap": _embedding,
}
"""Operations of raypfl whose CUDA kernels may add with atomics, or may be missing a deterministic algorithm."""


def checked_operation(name: str, device: str) -> Row:
    """Whether an operation gives the same bits each time, and its mean time; the first of five calls loads kernels."""
    if device == "cuda":
        same_bits_on_gpus()
    hashes = set()
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            torch.manual_seed(0)
            hashes.add(hashlib.sha256(OPERATIONS[name](device).cpu().numpy().tobytes()).hexdigest())
    row: Row = {"operation": name, "same_bits": len(hashes) == 1}
    row["milliseconds"] = 200 * (time.perf_counter() - start)
    if caught:
        row["warned"] = sorted({str(warning.message).splitlines()[0][:160] for warning in caught})
    return row
