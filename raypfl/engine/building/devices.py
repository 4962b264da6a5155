"""On which device a run computes, and how a GPU gives the same bits each time."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from raypfl.clients.gpu_errors import gpu_failure
from raypfl.common.errors import ConfigError
from raypfl.common.user_warnings import NOT_THE_USERS

if TYPE_CHECKING:
    from raypfl.experiment import Experiment

CONTEXT_BYTES = 832 * 2**20
"""What a process takes of a GPU besides its tensors: CUDA's context, with the kernels that it has loaded. On an H200,
``python -m benchmarks.gpu`` measured 689 to 777 MiB."""

AMPERE = 8
"""The first compute capability with TF32."""

_undo: list[Callable[[], None]] = []
"""What brings back the algorithms that this process had on CPUs before it used a GPU."""


def device_for(gpus: float) -> torch.device:
    """Return CUDA if GPUs are requested and available, else the CPU.

    `gpus` : the number of GPUs, or the share of one, as for Ray, so that both backends compute on the same device.
    """
    return torch.device("cuda" if gpus > 0 and torch.cuda.is_available() else "cpu")


def refuse_missing_gpu(experiment: Experiment) -> None:
    """Raise a ConfigError if a run in this process asks for a GPU that PyTorch does not find here."""
    if experiment.engine.backend != "inline" or torch.cuda.is_available():
        return

    requested = {
        "gpus_per_actor": experiment.ray.gpus_per_actor,
        "gpus_for_server": experiment.ray.gpus_for_server,
    }
    for name, gpus in requested.items():
        if gpus != 0:
            raise ConfigError(
                f"ray.{name} is {gpus}, but PyTorch {torch.__version__} finds no GPU in this process. Set "
                f"ray.{name}=0 to compute on the CPU; or check nvidia-smi, CUDA_VISIBLE_DEVICES, and that this PyTorch "
                "was built for CUDA."
            )


def same_bits_on_gpus(tf32: bool = False) -> None:
    """Use deterministic algorithms on GPUs in this process.

    PyTorch warns where there is no such algorithm.

    `tf32` : whether the factors of matrix products and convolutions are rounded to TF32, which has 10 bits; False: full
    fp32.

    Raises
    ------
    ConfigError : if `tf32` is true and this process's GPU has no TF32, which came with Ampere.
    """
    if tf32:
        _refuse_tf32_before_ampere()
    if not _undo:
        _undo.extend(_algorithms_as_they_are())
    # cuBLAS is deterministic only with a workspace of a fixed size.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    # The name since torch 2.9, which the user's code may have set, and which would then hold for cuDNN.
    torch.backends.cudnn.fp32_precision = "tf32" if tf32 else "ieee"
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Fused attention, whose gradients stay nondeterministic with `warn_only`.
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    for beginning in NOT_THE_USERS:
        warnings.filterwarnings("ignore", beginning)
    # Uninitialised memory is always overwritten here, so filling it would only cost time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def algorithms_of_cpus() -> None:
    """Bring back the algorithms that this process had before it used a GPU, some of which round differently on CPUs."""
    while _undo:
        _undo.pop()()


def _algorithms_as_they_are() -> Iterator[Callable[[], None]]:
    """Yield functions that bring back the present algorithms, as far as they are CPUs', too."""
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    yield partial(torch.use_deterministic_algorithms, is_deterministic, warn_only=warns_only)
    yield partial(torch.backends.cuda.enable_flash_sdp, torch.backends.cuda.flash_sdp_enabled())
    yield partial(torch.backends.cuda.enable_mem_efficient_sdp, torch.backends.cuda.mem_efficient_sdp_enabled())


def _refuse_tf32_before_ampere() -> None:
    major, minor = torch.cuda.get_device_capability()
    if major < AMPERE:
        raise ConfigError(
            f"training.precision is 'tf32', but {torch.cuda.get_device_name()} has compute capability {major}.{minor}: "
            f"TF32 needs {AMPERE}.0 (Ampere) or later, and would have no effect. Set training.precision=fp32, or name "
            "a later GPU in ray.accelerator."
        )


def limit_memory(gpus: float) -> None:
    """Keep this process within its share of a GPU, CUDA's context included.

    Ray's shares limit nothing by themselves. Every process that has one calls this, so that all of them fit the GPU.

    `gpus` : the GPUs of this process; nothing happens unless it is a fraction of one.

    Raises
    ------
    ConfigError : if the context alone fills the share.
    """
    if not 0 < gpus < 1:
        return
    total = torch.cuda.get_device_properties(torch.device("cuda")).total_memory
    fraction = gpus - CONTEXT_BYTES / total
    if fraction <= 0:
        raise ConfigError(
            f"A share of {gpus:g} of this GPU is {gpus * total / 2**20:,.0f} MiB, but CUDA itself takes about "
            f"{CONTEXT_BYTES / 2**20:.0f} MiB in each process. Let fewer processes share it: a larger "
            "ray.gpus_per_actor or ray.gpus_for_server."
        )
    torch.cuda.set_per_process_memory_fraction(fraction)


@contextlib.contextmanager
def memory_limited(gpus: float) -> Iterator[None]:
    """While active, this process is kept within its share of a GPU; see :func:`limit_memory`."""
    limit_memory(gpus)
    try:
        yield
    finally:
        # After a failure of the GPU this would raise, and hide the run's own error.
        if 0 < gpus < 1 and not gpu_failure():
            torch.cuda.set_per_process_memory_fraction(1.0)


def mps_runs() -> bool:
    """Return whether NVIDIA's multi-process service runs here; without it, processes that share a GPU take turns."""
    return Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"), "control").exists()
