"""Packages that only some of raypfl needs."""

from __future__ import annotations

from raypfl.common.errors import ConfigError


def not_installed(what: str, package: str, extra: str = "") -> ConfigError:
    """The error for `what` was asked for, which needs a missing package; an `extra` of raypfl may install it."""
    install = f"'raypfl[{extra}]'" if extra else package
    return ConfigError(f"{what}, but {package} is not installed: pip install {install}")
