"""Conditions under which a setting has an effect, declared with the setting.

``clip: Annotated[float, needs("noise")] = 1.0`` has no effect while ``noise`` is null. A description that nevertheless
sets it is refused; see :mod:`raypfl.experiment.checks.effects`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Condition:
    """A condition on another setting.

    Attributes
    ----------
    setting : the other setting: its name in the same section, or a dotted name.
    holds : whether a value of the other setting fulfils the condition.
    advice : the advice in the error message, with ``{other}`` and ``{this}`` in place of the dotted names.
    otherwise : a condition that suffices if this one does not hold; None: there is none.
    """

    setting: str
    holds: Callable[[Any], bool]
    advice: str
    otherwise: Condition | None = None


def needs(setting: str, *values: Any) -> Condition:
    """Require the other setting to be one of `values`; without values, to be set: not null, false or empty."""
    if not values:
        return Condition(setting, _is_set, "set {other}, or leave {this} out")
    choices = " or ".join(as_yaml(value) for value in values)
    return Condition(setting, lambda value: value in values, f"set {{other}} to {choices}, or leave {{this}} out")


def needs_some(setting: str, otherwise: Condition | None = None) -> Condition:
    """Require the other setting to be set and not zero, or another condition."""
    return Condition(setting, lambda v: _is_set(v) and v != 0, "raise {other}, or leave {this} out", otherwise)


def needs_among(setting: str, member: str) -> Condition:
    """Require the other setting to be a list that has `member`."""
    return Condition(setting, lambda value: member in value, f"add {member!r} to {{other}}, or leave {{this}} out")


def unless(setting: str) -> Condition:
    """Require that the other setting, which takes precedence, is not set."""
    return Condition(setting, lambda value: not _is_set(value), "leave one of them out")


def _is_set(value: Any) -> bool:
    return value is not None and value is not False and value not in ("", (), [], {})


def as_yaml(value: Any) -> str:
    """Write a value as in YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(list(value) if isinstance(value, tuple) else value)
