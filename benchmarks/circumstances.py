"""The commit, the date, the processor and the machine's load of a measurement."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any

import torch

import raypfl
from raypfl.common.checkout import commit

ROOT = Path(__file__).resolve().parents[1]
MEASURED = ("raypfl", "benchmarks", ":!benchmarks/results")
"""Paths whose changes make a tree differ from its commit; results are written during a measurement."""


def circumstances(root: Path = ROOT) -> dict[str, Any]:
    """The ``commit``, the ``date`` (UTC) and the ``load``, an average over the last minute."""
    date = time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime())
    return {"commit": commit(root, MEASURED), "date": date, "load": round(os.getloadavg()[0], 2)}


def about() -> str:
    """The versions and the machine, in a line."""
    versions = f"raypfl {raypfl.__version__}, torch {torch.__version__}"
    return f"{versions} on {processor()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor, as ``"x86_64 (AMD EPYC, family 25, model 1, without AVX-512)"``.

    A virtual machine may hide the model's name, and results depend on its vector instructions.
    """
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    pairs = [line.partition(":") for line in lines]
    values = {name.strip(): value.strip() for name, _, value in pairs}
    if "flags" not in values:
        return platform.machine()

    has_avx512 = "avx512f" in values["flags"].split()
    parts = [values.get("model name", "")]
    parts += [f"{name.removeprefix('cpu ')} {values[name]}" for name in ("cpu family", "model") if name in values]
    parts.append(f"{'with' if has_avx512 else 'without'} AVX-512")
    return f"{platform.machine()} ({', '.join(filter(None, parts))})"
