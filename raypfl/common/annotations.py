"""Annotations of a dataclass's fields: ``clip: Annotated[float, needs("noise")] = 1.0``."""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Any, get_args, get_origin, get_type_hints


@lru_cache(maxsize=512)
def declared(dataclass: Any, item_type: type) -> dict[str, tuple[Any, ...]]:
    """Return field -> the objects of `item_type` in its annotation; fields without any are left out.

    A subclass may declare a field again, for another default: without objects of its own, it keeps the inherited ones.
    """
    by_field: dict[str, tuple[Any, ...]] = {}
    for cls in reversed(dataclass.__mro__):
        for name, hint in _hints(cls).items():
            if get_origin(hint) is not Annotated:
                continue
            _, *metadata = get_args(hint)
            items = tuple(item for item in metadata if isinstance(item, item_type))
            if items:
                by_field[name] = items
    return by_field


def _hints(cls: type) -> dict[str, Any]:
    """Return the types of the fields that a class itself declares."""
    try:
        hints = get_type_hints(cls, include_extras=True)
    except (NameError, TypeError):  # a name that is imported for the type checker only
        return {}
    return {name: hints[name] for name in vars(cls).get("__annotations__", {}) if name in hints}
