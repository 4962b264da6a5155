"""The condition under which a setting has an effect, which it names where it is declared.

``clip: Annotated[float, needs("noise")] = 1.0`` has no effect while ``noise`` is null. A description that sets it then
is refused; see :mod:`raypfl.experiment.checks.effects`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Condition:
    """What another setting must be.

    Attributes
    ----------
    setting : of the same section, or a dotted name.
    holds : whether one of its values is such.
    mend : what to do, with ``{other}`` and ``{this}`` in place of the dotted names.
    """

    setting: str
    holds: Callable[[Any], bool]
    mend: str


def needs(setting: str, *values: Any) -> Condition:
    """The other setting is one of `values`; without these, it is given: not null, false or empty."""
    if not values:
        return Condition(setting, _is_given, "set {other}, or leave {this} out")
    choices = " or ".join(_word(value) for value in values)
    return Condition(setting, lambda value: value in values, f"set {{other}} to {choices}, or leave {{this}} out")


def needs_some(setting: str) -> Condition:
    """The other setting is given and not zero."""
    return Condition(setting, lambda value: _is_given(value) and value != 0, "raise {other}, or leave {this} out")


def needs_among(setting: str, member: str) -> Condition:
    """The other setting is a list that has `member`."""
    return Condition(setting, lambda value: member in value, f"add {member!r} to {{other}}, or leave {{this}} out")


def unless(setting: str) -> Condition:
    """The other setting, which takes precedence, is not given."""
    return Condition(setting, lambda value: not _is_given(value), "leave one of them out")


def _is_given(value: Any) -> bool:
    return value is not None and value is not False and value not in ("", (), [], {})


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
