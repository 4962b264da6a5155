"""Names and numbers as the page prints them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_PROTOCOLS = {
    "local": "each client’s own test data",
    "val": "each client’s own validation data",
    "train": "each client’s own training data",
    "global": "all clients’ test data together",
    "pm_v": "all clients’ test data, only the client’s classes counting",
    "pm_l": "all clients’ test data, classes weighted as the client has them",
    "unseen": "the own test data of clients that were never trained",
}


def protocol_name(protocol: str) -> str:
    """The test data of a protocol."""
    kind, _, rest = protocol.partition("/")
    if rest.startswith("corrupt/"):
        name, _, severity = rest.removeprefix("corrupt/").partition("/")
        strength = f"severity {severity}" if severity else "all severities"
        return f"all clients’ test data, corrupted: {name.replace('_', ' ')}, {strength}"
    return _PROTOCOLS.get(protocol, f"the pool {rest}" if kind == "ood" else protocol)


def as_yaml(value: Any) -> str:
    """A setting, as YAML has it."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    return ", ".join(map(as_yaml, value)) or "none" if isinstance(value, list) else str(value)


def listed(names: Sequence[str]) -> str:
    """``a, b and c``."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
