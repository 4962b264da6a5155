"""What an experiment is made of: methods, objectives, metrics, optimizers, analyses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, dataclass_transform


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Component:
    """A class whose subclasses become frozen dataclasses by themselves; their fields are options of an experiment."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        dataclass(frozen=True, kw_only=True)(cls)
