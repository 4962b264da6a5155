"""Import libraries of networks on first use, and check that they have what a name asks for."""

from __future__ import annotations

import importlib
from collections.abc import Collection
from typing import Any

from raypfl.common.errors import ConfigError, did_you_mean
from raypfl.common.optional_packages import not_installed


def import_library(module: str, reason: str, extra: str = "") -> Any:
    """Import and return a module, or raise the error of :func:`not_installed`."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise not_installed(reason, module.partition(".")[0], extra) from None


def require_known(sentence: str, name: str, available: Collection[str]) -> None:
    """Raise a ConfigError with this sentence and the nearest available name, unless `name` is available."""
    if name not in available:
        raise ConfigError(f"{sentence}; {did_you_mean(name, available)}")
