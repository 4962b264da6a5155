"""Search spaces: which values a setting may take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil, floor
from typing import Any

from raypfl.common.errors import ConfigError, did_you_mean

RANGES = {"uniform": float, "loguniform": float, "randint": int, "lograndint": int}
"""Kinds of numeric space, each of ``[low, high]``. Those of integers include neither more nor less than Ray Tune's:
`high` is excluded."""

QUANTISED = {f"q{kind}": number for kind, number in RANGES.items()}
"""Kinds of ``[low, high, step]``: multiples of `step` from `low` to `high`, which is included, as Ray Tune has them."""

NUMBERS = RANGES | QUANTISED

LISTS = ("choice", "grid")
"""Kinds of space of ``[value, ...]``: one is drawn, or all are tried."""

KINDS = (*NUMBERS, *LISTS)


@dataclass(frozen=True)
class Space:
    """The values of one setting.

    Attributes
    ----------
    key : of the setting, such as ``training.lr``.
    kind : one of `NUMBERS` or `LISTS`.
    values : ``[low, high]`` of a range, else the values.
    owner, when : the key of another setting and the position of the value that it must have for this one to count;
        empty and -1 if it always counts.
    step : of which numbers are multiples; None: of none.
    """

    key: str
    kind: str
    values: tuple[Any, ...]
    owner: str = ""
    when: int = -1
    step: float | None = None

    @property
    def name(self) -> str:
        """What distinguishes this space from all others of a sweep."""
        return f"{self.key}@{self.when}" if self.owner else self.key

    @property
    def is_range(self) -> bool:
        return self.kind in NUMBERS

    @property
    def is_integer(self) -> bool:
        return NUMBERS.get(self.kind) is int

    @property
    def is_logarithmic(self) -> bool:
        return self.kind.removeprefix("q").startswith("log")

    def value(self, drawn: float) -> Any:
        """What is drawn as a setting's value: a number, of four digits so that people can read it, or one of a list."""
        if not self.is_range:
            return self.values[int(drawn)]
        if self.is_integer or self.step is not None:
            return self.inside(drawn)
        return self.inside(float(f"{drawn:.4g}"))

    def inside(self, number: float) -> Any:
        """The nearest number that a range has."""
        low, high = self.values
        if self.step is not None:
            multiple = min(max(round(number / self.step), ceil(low / self.step)), floor(high / self.step))
            return multiple * self.step if self.is_integer else float(f"{multiple * self.step:.10g}")
        if self.is_integer:
            high -= 1
            number = round(number)
        return min(max(number, low), high)

    def position(self, value: Any) -> Any:
        """What would be drawn for a setting's value: the number itself, or the position in a list.

        Raises
        ------
        ConfigError : if the space does not have that value.
        """
        if self.is_range:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and self.inside(value) == value:
                return value
        else:
            for position, listed in enumerate(self.values):
                name = listed.get("name") if isinstance(listed, Mapping) else listed
                if value in (listed, name, in_words(listed)):
                    return position
        raise ConfigError(f"points has {self.key}: {value!r}, which search.{self.key} does not have.")


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
    if kind in NUMBERS:
        low, high, *step = _bounds(key, kind, values)
        yield Space(key, kind, (low, high), owner, when, *step)
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
    if kind not in KINDS:
        raise ConfigError(f"search.{key}: {kind!r} is no kind of space; {did_you_mean(str(kind), KINDS)}")
    return str(kind), values


def _is_space(value: Any) -> bool:
    return isinstance(value, Mapping) and len(value) == 1 and next(iter(value)) in KINDS


def _plain(value: Any) -> Any:
    """A choice without the spaces inside it."""
    return {name: one for name, one in value.items() if not _is_space(one)} if isinstance(value, Mapping) else value


def _bounds(key: str, kind: str, values: Any) -> list[Any]:
    """``[low, high]``, or ``[low, high, step]`` of a quantised kind."""
    number = NUMBERS[kind]
    form = "[low, high, step]" if kind in QUANTISED else "[low, high]"
    try:
        low, high, *step = numbers = [number(value) for value in values]
    except (TypeError, ValueError):
        numbers = []
    if len(numbers) != form.count(",") + 1:
        raise ConfigError(f"search.{key}: {kind} is {values!r}; it must be {form}.")

    is_logarithmic = kind.removeprefix("q").startswith("log")
    if not low < high or (is_logarithmic and low <= 0):
        least = "0 < low < high" if is_logarithmic else "low < high"
        raise ConfigError(f"search.{key}: {kind} is {values}; it must be {form} with {least}.")
    if step and not (step[0] > 0 and ceil(low / step[0]) < floor(high / step[0])):
        raise ConfigError(f"search.{key}: {kind} is {values}, which has fewer than two multiples of the step.")
    return numbers


def placed(spaces: list[Space], point: Mapping[str, Any]) -> dict[str, Any]:
    """Name of each space -> what would be drawn for a configuration, the reverse of `chosen`.

    What does not count in the configuration gets its lowest value.

    Parameters
    ----------
    point : setting -> value, as tables show it, such as ``{"method": "ditto", "method.lam": 0.1}``.

    Raises
    ------
    ConfigError : if a searched setting is missing, or a value is not in its space.
    """
    drawn: dict[str, Any] = {}
    used = set()
    for space in spaces:
        if space.owner and drawn[space.owner] != space.when:
            drawn[space.name] = space.values[0] if space.is_range else 0
            continue
        if space.key not in point:
            raise ConfigError(f"points has {dict(point)}, without {space.key}; give a value of every searched setting.")
        drawn[space.name] = space.position(point[space.key])
        used.add(space.key)

    if others := [key for key in point if key not in used]:
        raise ConfigError(f"points has {others[0]!r}, which is not searched there; {did_you_mean(others[0], used)}")
    return drawn


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
