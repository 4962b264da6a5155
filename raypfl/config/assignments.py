"""``dotted.key=value``, as the command line and sweeps change an experiment."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from raypfl.common.errors import ConfigError
from raypfl.config.yaml_text import parse


def parsed(assignments: Iterable[str]) -> list[tuple[list[str], Any]]:
    """Paths and values of assignments, the shorter paths first, so that ``method=ditto`` never undoes ``method.lam=1``.

    Raises
    ------
    ConfigError : for one without ``=`` or with a value that is not YAML.
    """
    pairs = []
    for text in assignments:
        key, equals, value = text.partition("=")
        path = key.strip().split(".")
        if not equals or not all(path):
            raise ConfigError(f"{text!r} is not an assignment; write dotted.key=value, such as training.lr=0.05.")
        # To YAML a star begins an alias, of which there can be none here; to a person, a pattern such as *.bias.
        pattern = value.lstrip().startswith("*")
        pairs.append((path, value.strip() if pattern else parse(value, f"The value in {text!r}")))
    return sorted(pairs, key=lambda pair: len(pair[0]))


def last_of_each(assignments: Iterable[str]) -> list[str]:
    """Without those whose key is assigned again later."""
    return list({text.partition("=")[0].strip(): text for text in assignments}.values())


def dotted(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one, with ``dotted.key`` paths."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= dotted(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def assign(values: dict[str, Any], path: list[str], value: Any) -> None:
    """Set what stands at `path` in nested dicts, in place; a part that is a name alone gets options beside it."""
    for depth, key in enumerate(path[:-1], start=1):
        inner = values.get(key)
        if isinstance(inner, str) and (depth == 1 or path[:depth] == ["training", "optimizer"]):
            inner = {"name": inner}
        if not isinstance(inner, dict | None):
            raise ConfigError(
                f"{'.'.join(path)} cannot be set: {'.'.join(path[:depth])} is {inner!r}, which has no parts."
            )
        values[key] = dict(inner or {})
        values = values[key]
    values[path[-1]] = value
