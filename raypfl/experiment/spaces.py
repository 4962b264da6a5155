"""Search spaces: which values a setting may take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil, floor, isfinite
from typing import Any

from raypfl.common.errors import ConfigError, did_you_mean
from raypfl.experiment.checks.effects import assign_all, require_effect
from raypfl.experiment.experiment import Experiment

RANGES = {"uniform": float, "loguniform": float, "randint": int, "lograndint": int}
"""Kinds of ``[low, high]``, and their type of number. As in Ray Tune, `high` is excluded from those of integers."""

QUANTISED = {f"q{kind}": number for kind, number in RANGES.items()}
"""Kinds of ``[low, high, step]``: multiples of `step` from `low` to `high`, which is included, as in Ray Tune."""

NUMBERS = RANGES | QUANTISED

LISTS = ("choice", "grid")
"""Kinds of ``[value, ...]``: one value is drawn (``choice``), or all are tried (``grid``)."""

KINDS = (*NUMBERS, *LISTS)


@dataclass(frozen=True)
class Space:
    """The values of one setting.

    Attributes
    ----------
    key : the key of the setting, such as ``training.lr``.
    kind : one of `NUMBERS` or `LISTS`.
    values : ``[low, high]`` of a range, else the values.
    owner, when : the key of a choice, and the position of the value in it for which this space counts; empty and -1
        for a space that always counts.
    step : the number of which all values are multiples; None: they need not be.
    """

    key: str
    kind: str
    values: tuple[Any, ...]
    owner: str = ""
    when: int = -1
    step: float | None = None

    @property
    def name(self) -> str:
        """A name that no other space of the sweep has."""
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

    def at(self, share: float) -> Any:
        """Return the draw that lies at a share, from 0 up to but without 1, of the space."""
        if not self.is_range:
            return int(share * len(self.values))

        low, high = self.values
        draw = low * (high / low) ** share if self.is_logarithmic else low + share * (high - low)
        # A quantised integer is rounded to the nearest multiple instead.
        return floor(draw) if self.is_integer and self.step is None else draw

    def value(self, draw: float) -> Any:
        """Return the setting's value for a draw: a number of four digits, which people can read, or a listed value."""
        if not self.is_range:
            return self.values[int(draw)]
        if self.is_integer or self.step is not None:
            return self.inside(draw)
        return self.inside(float(f"{draw:.4g}"))

    def inside(self, number: float) -> Any:
        """Return the nearest number in a range."""
        low, high = self.values
        if self.step is not None:
            lowest, highest = _multiples(low, high, self.step)
            multiple = min(max(round(number / self.step), lowest), highest)
            return multiple * self.step if self.is_integer else float(f"{multiple * self.step:.10g}")
        if self.is_integer:
            high -= 1
            number = round(number)
        return min(max(number, low), high)

    def position(self, value: Any) -> Any:
        """Return the draw for a setting's value, the reverse of `value`: the number itself, or the position in a list.

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
    """Return the spaces of a sweep's ``search`` section.

    A value of a ``choice`` may be a mapping with spaces of its own, which count where that value is drawn::

        method: {choice: [fedavg, {name: ditto, lam: {loguniform: [0.001, 10]}}]}

    Raises
    ------
    ConfigError : if one of them is not valid.
    """
    spaces: list[Space] = []
    for key, section in search.items():
        spaces += _spaces(str(key), section, owner="", when=-1)
    return spaces


def _spaces(key: str, section: Any, owner: str, when: int) -> Iterator[Space]:
    """Yield the space of a setting and, after it, those inside its choices."""
    kind, values = _kind(key, section)
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
        options = value.items() if isinstance(value, Mapping) else ()
        inner = {name: option for name, option in options if _is_space(option)}
        if inner and owner:
            raise ConfigError(f"search.{key}: a choice within a choice cannot have spaces of its own.")
        for name, option in inner.items():
            yield from _spaces(f"{key}.{name}", option, key, position)


def _kind(key: str, section: Any) -> tuple[str, Any]:
    """Return the kind of a space, and its values as they are written."""
    if not isinstance(section, Mapping) or len(section) != 1:
        raise ConfigError(
            f"search.{key} is {section!r}; it must be one space, such as {{loguniform: [0.001, 0.1]}}, "
            f"{{choice: [1, 5, 10]}} or {{grid: [1, 5, 10]}}."
        )
    ((kind, values),) = section.items()
    if kind not in KINDS:
        raise ConfigError(f"search.{key}: {kind!r} is not a kind of space; {did_you_mean(str(kind), KINDS)}")
    return str(kind), values


def _is_space(value: Any) -> bool:
    return isinstance(value, Mapping) and len(value) == 1 and next(iter(value)) in KINDS


def _plain(value: Any) -> Any:
    """Return a choice without the spaces inside it."""
    if not isinstance(value, Mapping):
        return value
    return {name: option for name, option in value.items() if not _is_space(option)}


def _bounds(key: str, kind: str, values: Any) -> list[Any]:
    """Return ``[low, high]`` or, for a quantised kind, ``[low, high, step]``."""
    form = "[low, high, step]" if kind in QUANTISED else "[low, high]"
    try:
        numbers = [_number(kind, value) for value in values]
    except (TypeError, ValueError):
        numbers = []
    if len(numbers) != form.count(",") + 1:
        numbers_in_words = "whole numbers" if NUMBERS[kind] is int else "numbers"
        raise ConfigError(f"search.{key}: {kind} is {values!r}; it must be {form}, all of them {numbers_in_words}.")

    low, high, *step = numbers
    is_logarithmic = kind.removeprefix("q").startswith("log")
    if not low < high or (is_logarithmic and low <= 0):
        least = "0 < low < high" if is_logarithmic else "low < high"
        raise ConfigError(f"search.{key}: {kind} is {values}; it must be {form} with {least}.")
    if step:
        lowest, highest = _multiples(low, high, step[0]) if step[0] > 0 else (0, 0)
        if lowest >= highest:
            raise ConfigError(f"search.{key}: {kind} is {values}, which has fewer than two multiples of the step.")
    return numbers


def _number(kind: str, value: Any) -> Any:
    """Return a bound or step of a space; raise a ValueError for another value than a number of its kind."""
    number = float(value)
    if isinstance(value, bool) or not isfinite(number):
        raise ValueError(value)
    if NUMBERS[kind] is int:
        if not number.is_integer():
            raise ValueError(value)
        return int(value)
    return number


def _multiples(low: float, high: float, step: float) -> tuple[int, int]:
    """Return the first and the last of the multiples of a step from `low` to `high`, both of which may be one."""
    # In floating point, 0.7 / 0.1 is a little less than 7.
    return ceil(round(low / step, 9)), floor(round(high / step, 9))


def draws_of_point(spaces: list[Space], point: Mapping[str, Any]) -> dict[str, Any]:
    """Return the draws for a configuration, by the names of the spaces: the reverse of `values_by_setting`.

    A space that does not count in the configuration gets its lowest value.

    Parameters
    ----------
    point : setting -> value, as tables show it, such as ``{"method": "ditto", "method.lam": 0.1}``.

    Raises
    ------
    ConfigError : if a searched setting is missing, or a value is not in its space.
    """
    draws: dict[str, Any] = {}
    used = set()
    for space in spaces:
        if space.owner and draws[space.owner] != space.when:
            draws[space.name] = space.values[0] if space.is_range else 0
            continue
        if space.key not in point:
            raise ConfigError(f"points has {dict(point)}, without {space.key}; give a value of every searched setting.")
        draws[space.name] = space.position(point[space.key])
        used.add(space.key)

    unused = [key for key in point if key not in used]
    if unused:
        raise ConfigError(f"points has {unused[0]!r}, which is not searched there; {did_you_mean(unused[0], used)}")
    return draws


def values_by_setting(spaces: list[Space], draws: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a configuration by setting, as in an experiment; spaces that do not count are left out.

    Parameters
    ----------
    draws : Tune's draw for each space, by the space's name: a number or, for a list, the position of a value.
    """
    values: dict[str, Any] = {}
    for space, value in _counting(spaces, draws):
        if space.owner:
            option = space.key.removeprefix(f"{space.owner}.")
            values[space.owner] = {**values[space.owner], option: value}
        else:
            values[space.key] = value
    return values


def values_by_column(spaces: list[Space], draws: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a configuration by column, as in a table; spaces that do not count are left out."""
    return {space.key: in_words(value) for space, value in _counting(spaces, draws)}


def _counting(spaces: list[Space], draws: Mapping[str, Any]) -> Iterator[tuple[Space, Any]]:
    """Yield the spaces that count in a configuration, and the values of their settings."""
    for space in spaces:
        if not space.owner or draws[space.owner] == space.when:
            yield space, space.value(draws[space.name])


def configured(experiment: Experiment, configuration: Mapping[str, Any]) -> Experiment:
    """Return an experiment with the values of a configuration, by setting.

    Raises
    ------
    ConfigError : if the experiment refuses a value, or one has no effect in it.
    """
    values = experiment.to_dict()
    require_effect(assign_all(values, assignments_of(configuration)))
    return Experiment(**values)


def assignments_of(configuration: Mapping[str, Any]) -> list[tuple[list[str], Any]]:
    """Return the paths and values of a configuration, shorter paths first: `method` must not undo `method.lam`."""
    pairs = [(key.split("."), value) for key, value in configuration.items()]
    return sorted(pairs, key=lambda pair: len(pair[0]))


def in_words(value: Any) -> Any:
    """Return a mapping with a name as text, such as ``"ditto lam=0.1"``, and any other value as it is."""
    if not isinstance(value, Mapping):
        return value
    return " ".join(str(option) if key == "name" else f"{key}={option}" for key, option in value.items())
