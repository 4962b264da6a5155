"""Search spaces: which values a setting may take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from raypfl.common.errors import ConfigError, did_you_mean

RANGES = {"uniform": float, "loguniform": float, "randint": int, "lograndint": int}
"""Kinds of numeric space, each of ``[low, high]``. Those of integers include neither more nor less than Ray Tune's:
`high` is excluded."""

LISTS = ("choice", "grid")
"""Kinds of space of ``[value, ...]``: one is drawn, or all are tried."""


@dataclass(frozen=True)
class Space:
    """The values of one setting.

    Attributes
    ----------
    key : of the setting, such as ``training.lr``.
    kind : one of `RANGES` or `LISTS`.
    values : ``[low, high]`` of a range, else the values.
    owner, when : the key of another setting and the position of the value that it must have for this one to count;
        empty and -1 if it always counts.
    """

    key: str
    kind: str
    values: tuple[Any, ...]
    owner: str = ""
    when: int = -1

    @property
    def name(self) -> str:
        """What distinguishes this space from all others of a sweep."""
        return f"{self.key}@{self.when}" if self.owner else self.key

    @property
    def is_range(self) -> bool:
        return self.kind in RANGES

    def value(self, drawn: float) -> Any:
        """What is drawn as a setting's value: a number, of four digits so that people can read it, or one of a list."""
        if not self.is_range:
            return self.values[int(drawn)]
        low, high = self.values
        return min(max(float(f"{drawn:.4g}"), low), high) if RANGES[self.kind] is float else drawn


def spaces_of(search: Mapping[str, Any]) -> list[Space]:
    """The spaces of a sweep's ``search`` section.

    A value of a ``choice`` may be a mapping with spaces of its own, which count where that value is drawn::

        method: {choice: [fedavg, {name: ditto, lam: {loguniform: [0.001, 10]}}]}

    Raises
    ------
    ConfigError : for a space that is none.
    """
    return [space for key, given in search.items() for space in _spaces(str(key), given, "", -1)]


def _spaces(key: str, given: Any, owner: str, when: int) -> Iterator[Space]:
    kind, values = _kind(key, given)
    if kind == "grid" and owner:
        raise ConfigError(f"search.{key}: a grid cannot stand inside a choice; use choice there, too.")
    if kind in RANGES:
        yield Space(key, kind, _bounds(key, kind, values), owner, when)
        return
    if not isinstance(values, list) or not values:
        raise ConfigError(f"search.{key}: {kind} is {values!r}; it must be a list of values.")
    plain = [_plain(value) for value in values]
    yield Space(key, kind, tuple(plain), owner, when)
    for position, value in enumerate(values):
        inner = {name: one for name, one in value.items() if _is_space(one)} if isinstance(value, Mapping) else {}
        if inner and owner:
            raise ConfigError(f"search.{key}: a choice within a choice cannot have spaces of its own.")
        for name, one in inner.items():
            yield from _spaces(f"{key}.{name}", one, key, position)


def _kind(key: str, given: Any) -> tuple[str, Any]:
    if not isinstance(given, Mapping) or len(given) != 1:
        raise ConfigError(
            f"search.{key} is {given!r}; it must be one space, such as {{loguniform: [0.001, 0.1]}}, "
            f"{{choice: [1, 5, 10]}} or {{grid: [1, 5, 10]}}."
        )
    ((kind, values),) = given.items()
    if kind not in RANGES and kind not in LISTS:
        raise ConfigError(f"search.{key}: {kind!r} is no kind of space; {did_you_mean(str(kind), [*RANGES, *LISTS])}")
    return str(kind), values


def _is_space(value: Any) -> bool:
    return isinstance(value, Mapping) and len(value) == 1 and next(iter(value)) in (*RANGES, *LISTS)


def _plain(value: Any) -> Any:
    """A choice without the spaces inside it."""
    return {name: one for name, one in value.items() if not _is_space(one)} if isinstance(value, Mapping) else value


def _bounds(key: str, kind: str, values: Any) -> tuple[float, float]:
    number = RANGES[kind]
    try:
        low, high = (number(value) for value in values)
    except (TypeError, ValueError):
        raise ConfigError(f"search.{key}: {kind} is {values!r}; it must be [low, high].") from None
    if not low < high or (kind.startswith("log") and low <= 0):
        least = "0 < low < high" if kind.startswith("log") else "low < high"
        raise ConfigError(f"search.{key}: {kind} is [{low:g}, {high:g}]; it must be [low, high] with {least}.")
    return low, high


def chosen(spaces: list[Space], drawn: Mapping[str, Any]) -> dict[str, Any]:
    """Setting -> value of one configuration, without what does not count in it.

    Parameters
    ----------
    drawn : name of each space -> a number or, of a list, the position of a value.
    """
    values: dict[str, Any] = {}
    for space, value in _counting(spaces, drawn):
        if space.owner:
            inside = values[space.owner]
            values[space.owner] = {**inside, space.key.removeprefix(f"{space.owner}."): value}
        else:
            values[space.key] = value
    return values


def shown(spaces: list[Space], drawn: Mapping[str, Any]) -> dict[str, Any]:
    """Column -> value of one configuration, for tables; what does not count is absent."""
    return {space.key: in_words(value) for space, value in _counting(spaces, drawn)}


def _counting(spaces: list[Space], drawn: Mapping[str, Any]) -> Iterator[tuple[Space, Any]]:
    """The spaces that count in a configuration, and the values of their settings."""
    for space in spaces:
        if not space.owner or drawn[space.owner] == space.when:
            yield space, space.value(drawn[space.name])


def in_words(value: Any) -> Any:
    """``"ditto lam=0.1"``, of a mapping with a name; another value as such."""
    if not isinstance(value, Mapping):
        return value
    return " ".join(str(one) if key == "name" else f"{key}={one}" for key, one in value.items())
