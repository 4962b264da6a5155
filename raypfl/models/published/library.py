"""Import libraries of networks on first use, and check names that they should have."""

from __future__ import annotations

import importlib
from collections.abc import Collection
from typing import Any

from raypfl.common.errors import ConfigError, did_you_mean
from raypfl.common.packages import not_installed


def library(module: str, reason: str, extra: str = "") -> Any:
    """Import a module.

    Parameters
    ----------
    reason : the setting that needs the module, as the error says it (``"model is 'timm:...'"``).
    extra : the extra of raypfl that installs it, if there is one.

    Raises
    ------
    ConfigError : if the module is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise not_installed(reason, module.partition(".")[0], extra) from None


def require(sentence: str, name: str, available: Collection[str]) -> None:
    """Raise a ConfigError of this sentence and the nearest available name, unless `name` is available."""
    if name not in available:
        raise ConfigError(f"{sentence}; {did_you_mean(name, available)}")
