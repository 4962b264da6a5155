"""What a dataclass declares of its fields beside their types: ``clip: Annotated[float, needs("noise")] = 1.0``."""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Any, get_args, get_origin, get_type_hints


@lru_cache(maxsize=512)
def declared(kind: Any, wanted: type) -> dict[str, tuple[Any, ...]]:
    """Field -> the objects of the type `wanted` that its annotation has; only fields that have some.

    A subclass that declares a field again, for another default, inherits what it does not declare.
    """
    by_field: dict[str, tuple[Any, ...]] = {}
    for owner in reversed(kind.__mro__):
        for name, hint in _hints(owner).items():
            beside = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
            if objects := tuple(item for item in beside if isinstance(item, wanted)):
                by_field[name] = objects
    return by_field


def _hints(owner: type) -> dict[str, Any]:
    """The types of the fields that a class itself declares."""
    try:
        hints = get_type_hints(owner, include_extras=True)
    except (NameError, TypeError):  # a name that is imported for the type checker only
        return {}
    return {name: hints[name] for name in vars(owner).get("__annotations__", {}) if name in hints}
