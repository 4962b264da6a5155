"""What an experiment is made of: methods, objectives, metrics, optimizers, analyses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, dataclass_transform

from raypfl.common.errors import ConfigError
from raypfl.common.limits import outside


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Component:
    """A class whose subclasses become frozen dataclasses by themselves; their fields are options of an experiment.

    Attributes
    ----------
    section : of the experiment, by which messages name an option.
    """

    section: ClassVar[str] = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        dataclass(frozen=True, kw_only=True)(cls)

    def __post_init__(self) -> None:
        """Raise a ConfigError for an option that is outside of the limit that its type declares."""
        if lines := outside(self):
            raise ConfigError(" ".join(f"{self.section}{line}." for line in lines))


def undefined(entry: Any) -> str:
    """The abstract functions that a class has left undefined, separated by commas; empty for what has none."""
    return ", ".join(sorted(getattr(entry, "__abstractmethods__", ())))
