"""Libraries of networks: imported when one of their names is used, and asked for names."""

from __future__ import annotations

import importlib
from collections.abc import Collection
from typing import Any

from raypfl.common.errors import ConfigError, did_you_mean
from raypfl.common.packages import not_installed


def library(module: str, where: str, extra: str = "") -> Any:
    """The module, or a ConfigError that says `where` it is asked for and how (by which `extra`) it is installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise not_installed(where, module.partition(".")[0], extra) from None


def require(sentence: str, name: str, known: Collection[str]) -> None:
    """Raise a ConfigError of this sentence and the nearest known name, unless `name` is known."""
    if name not in known:
        raise ConfigError(f"{sentence}; {did_you_mean(name, known)}")
