"""The base class of an experiment's components: methods, objectives, metrics, optimizers, analyses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, dataclass_transform

from raypfl.common.errors import ConfigError
from raypfl.common.limits import limit_violations


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Component:
    """A class whose subclasses become frozen dataclasses by themselves; their fields are options of an experiment.

    Attributes
    ----------
    section : the experiment's section, which precedes an option's name in messages (``"method."``).
    """

    section: ClassVar[str] = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        dataclass(frozen=True, kw_only=True)(cls)

    def __post_init__(self) -> None:
        """Raise a ConfigError for an option that is outside of the limit that its type declares."""
        violations = limit_violations(self)
        if violations:
            raise ConfigError(" ".join(f"{self.section}{violation}." for violation in violations))


def abstract_functions(entry: Any) -> str:
    """Return the functions that a class still has to define, separated by commas; empty if there are none."""
    return ", ".join(sorted(getattr(entry, "__abstractmethods__", ())))
