"""Checks of the options of networks."""

from __future__ import annotations

from collections.abc import Sequence

from raypfl.common.errors import ConfigError


def require_counts(**options: int | Sequence[int]) -> None:
    """Raise a ConfigError unless these options of a model are at least 1; lists need one or more such numbers."""
    for name, value in options.items():
        if isinstance(value, int):
            if value < 1:
                raise ConfigError(f"model.{name} is {value}; it must be at least 1.")
        elif min(value, default=0) < 1:
            raise ConfigError(f"model.{name} is {list(value)}; it must have numbers of at least 1.")


def require_multiple(name: str, value: int, divisor_name: str, divisor: int) -> None:
    """Raise a ConfigError unless a model's option is a multiple of another one, and both are at least 1."""
    require_counts(**{name: value, divisor_name: divisor})
    if value % divisor:
        raise ConfigError(
            f"model.{name} is {value}; it must be a multiple of model.{divisor_name}, which is {divisor}."
        )
