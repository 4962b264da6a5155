"""Errors for optional packages that are not installed."""

from __future__ import annotations

from raypfl.common.errors import ConfigError


def not_installed(reason: str, package: str, extra: str = "") -> ConfigError:
    """Return the error for a missing package.

    Parameters
    ----------
    reason : the beginning of the message: what was asked for, such as ``"data.name is 'x'"``.
    extra : the extra of raypfl that installs the package, if there is one.
    """
    install = f"'raypfl[{extra}]'" if extra else package
    return ConfigError(f"{reason}, but {package} is not installed: pip install {install}")
