"""``dotted.key=value`` assignments, with which the command line and sweeps change an experiment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from raypfl.common.errors import ConfigError
from raypfl.experiment.yaml_text import parse

_INNER_COMPONENTS = {("training", "optimizer"), ("devices", "hardware"), ("devices", "availability")}
"""Components that are settings of a section."""


def parse_assignments(assignments: Iterable[str]) -> list[tuple[list[str], Any]]:
    """Parse assignments into paths and values, shorter paths first: ``method=ditto`` must not undo ``method.lam=1``.

    Raises
    ------
    ConfigError : if an assignment has no ``=`` or its value is not YAML.
    """
    if isinstance(assignments, str | Mapping):
        raise ConfigError(
            f"{assignments!r} is a {type(assignments).__name__}; assignments are a list such as ['training.lr=0.05']."
        )

    pairs = []
    for text in assignments:
        key, equals, value = text.partition("=")
        path = key.strip().split(".")
        if not equals or not all(path):
            raise ConfigError(f"{text!r} is not an assignment; write dotted.key=value, such as training.lr=0.05.")

        # In YAML a star starts an alias. Here it can only mean a pattern, such as *.bias.
        if value.lstrip().startswith("*"):
            pairs.append((path, value.strip()))
        else:
            pairs.append((path, _parsed(text, value)))

    return sorted(pairs, key=lambda pair: len(pair[0]))


def _parsed(text: str, value: str) -> Any:
    """Parse the value of an assignment, `text`; say how to quote it if a shell seems to have cut it at a space."""
    try:
        return parse(value, f"The value in {text!r}")
    except ConfigError as error:
        for opening, closing in ("{}", "[]"):
            if value.count(opening) > value.count(closing):
                raise ConfigError(
                    f"The value in {text!r} has no {closing!r} for its {opening!r}. A shell divides what has spaces: "
                    "put the whole assignment in quotes, as in 'method={name: ditto, lam: 0.1}'."
                ) from error
        raise


def last_of_each(assignments: Iterable[str]) -> list[str]:
    """Keep the last assignment to each key."""
    by_key = {text.partition("=")[0].strip(): text for text in assignments}
    return list(by_key.values())


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turn nested dicts into one dict with ``dotted.key`` paths."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def assign(values: dict[str, Any], path: list[str], value: Any) -> None:
    """Set the entry at `path` in nested dicts, in place.

    A component given by its name, such as ``method: ditto``, becomes a dict when one of its options is set.
    """
    for depth, key in enumerate(path[:-1], start=1):
        inner = values.get(key)
        may_be_component = depth == 1 or tuple(path[:depth]) in _INNER_COMPONENTS
        if isinstance(inner, str) and may_be_component:
            inner = {"name": inner}
        if not isinstance(inner, dict | None):
            raise ConfigError(
                f"{'.'.join(path)} cannot be set: {'.'.join(path[:depth])} is {inner!r}, which has no parts."
            )
        values[key] = dict(inner or {})
        values = values[key]
    values[path[-1]] = value
