"""Files of experiments, sweeps and studies are all YAML: which command takes one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from raypfl.common.errors import ConfigError

Kind = Literal["experiment", "sweep", "study"]

_COMMANDS: dict[Kind, str] = {"experiment": "raypfl run", "sweep": "raypfl tune", "study": "raypfl study"}
# No experiment has these keys.
_KEYS_OF_OTHERS = {"experiment", "extends", "metrics", "scheduler", "search", "searcher", "trials"}


def refuse_other_kind(values: Mapping[str, Any], file: str | Path, kind: Kind) -> None:
    """Raise a ConfigError, which names the command, if what a file describes is plainly of another kind."""
    described = _kind_of(values)
    if described not in (None, kind):
        article = "an" if described == "experiment" else "a"
        raise ConfigError(f"{file} describes {article} {described}: {_COMMANDS[described]} {file}")


def _kind_of(values: Mapping[str, Any]) -> Kind | None:
    """Return what values describe; None: it is not plain."""
    if "extends" in values or isinstance(values.get("methods"), Mapping):
        return "study"
    if "search" in values:
        return "sweep"
    if values.keys() & {"method", "methods"} and not values.keys() & _KEYS_OF_OTHERS:
        return "experiment"
    return None
