"""Mistakes found by pydantic, as sentences with dotted paths."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator

from raypfl.common.counting import counted
from raypfl.evaluation.masking import MASKS
from raypfl.evaluation.protocols import PROTOCOLS
from raypfl.learning.augmentation import AUGMENTATIONS

KeyPath = tuple[int | str, ...]

_EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "tuple": "a list",
    "list": "a list",
    "sequence": "a list",
    "an instance of sequence": "a list",
    "dict": "options as 'key: value'",
    "dataclass": "options as 'key: value'",
    "model": "options as 'key: value'",
}

_MEANT_BY_TYPE = {
    ("cohort", int): "size",
    ("cohort", float): "fraction",
    ("training", int): "epochs",
    ("training", float): "lr",
    ("evaluation", int): "every",
    ("checkpoint", int): "every",
    ("ray", int): "actors",
    ("engine", int): "threads",
    ("engine", str): "backend",
    ("training", str): "optimizer",
    ("failures", str): "on_client_failure",
    ("devices", str): "hardware",
    ("privacy", float): "noise",
    ("tracking", bool): "mlflow",
}
"""Section and type of a value given in its place -> the setting that is probably meant."""

_WORDS: dict[str, Iterable[str]] = {
    "evaluation.protocols": PROTOCOLS,
    "evaluation.masks": MASKS,
    "data.augmentation": AUGMENTATIONS,
}
"""Setting that is a list -> what can be in it."""


class Mistakes(ValueError):
    """Several mistakes in one value, a sentence for each; pydantic reports them with all others."""

    def __init__(self, lines: Sequence[str]):
        super().__init__("\n".join(lines))
        self.lines = list(lines)


class FilePart(BaseModel):
    """An experiment, a study or a sweep, or a part of one; it refuses unknown keys, and true or false as numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def _without_booleans_for_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        name = str(info.field_name)
        is_instance = dataclasses.is_dataclass(value) and not isinstance(value, type)
        plain = vars(value) if is_instance else value
        lines = boolean_mistakes(cls.model_fields[name].annotation, plain, name)
        if lines:
            raise Mistakes(lines)
        return value


def validation_mistakes(error: ValidationError, unknown: Callable[[KeyPath], str], prefix: KeyPath = ()) -> list[str]:
    """Return a sentence for each mistake.

    Parameters
    ----------
    unknown : text that follows the path of an unknown key: ``"is not an option of ditto; did you mean 'lam'?"``.
    prefix : path of the value that was validated.
    """
    lines = []
    for detail in error.errors():
        lines += _sentences(detail, unknown, prefix)
    return lines


def boolean_mistakes(hint: Any, value: Any, where: str) -> list[str]:
    """Return a sentence for each true or false in place of a number, which pydantic would read as 1 or 0.

    Parameters
    ----------
    hint : the declared type of `value`.
    where : the dotted path of `value`.
    """
    allowed_types = _alternatives(hint)
    if isinstance(value, bool):
        if bool in allowed_types:
            return []
        if float in allowed_types:
            return [f"{where} is {value}; it must be a number."]
        if int in allowed_types:
            return [f"{where} is {value}; it must be a whole number."]
        return []

    lines = []
    for inner_hint, inner_value, inner_where in _parts(allowed_types, value, where):
        lines += boolean_mistakes(inner_hint, inner_value, inner_where)
    return lines


def _parts(allowed_types: Sequence[Any], value: Any, where: str) -> Iterator[tuple[Any, Any, str]]:
    """Yield declared type, value and dotted path of each part of a dataclass, mapping or list."""
    for allowed in allowed_types:
        arguments = get_args(allowed)
        if isinstance(allowed, type) and dataclasses.is_dataclass(allowed) and isinstance(value, dict):
            for key, inner in value.items():
                yield _hints(allowed).get(key), inner, f"{where}.{key}"
        elif get_origin(allowed) is dict and isinstance(value, dict):
            for key, inner in value.items():
                yield arguments[1], inner, f"{where}.{key}"
        elif arguments and get_origin(allowed) is not dict and isinstance(value, list | tuple):
            for i, inner in enumerate(value):
                yield arguments[0], inner, f"{where}[{i}]"


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """Return the types that a union allows, or the only type."""
    if get_origin(hint) is Annotated:
        return _alternatives(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return get_args(hint)
    return (hint,)


@lru_cache
def _hints(section: type) -> dict[str, Any]:
    return get_type_hints(section)


def _dotted(path: KeyPath) -> str:
    """Write ``("training", "milestones", 0)`` as ``training.milestones[0]``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")


def _sentences(detail: Any, unknown: Callable[[KeyPath], str], prefix: KeyPath) -> list[str]:
    kind = detail["type"]
    path = (*prefix, *detail["loc"])
    dotted = _dotted(path)

    if kind == "value_error":
        raised = detail["ctx"]["error"]
        return raised.lines if isinstance(raised, Mistakes) else [str(raised)]
    if kind in {"extra_forbidden", "unexpected_keyword_argument"}:
        return [f"{dotted} {unknown(path)}"]
    if kind in {"missing", "missing_argument"}:
        return [f"{dotted} is needed and has no default."]
    if kind == "too_short":
        return [f"{dotted} is empty; it needs at least {counted(detail['ctx']['min_length'], 'entry', 'entries')}."]

    value = detail["input"]
    expected = _expected(detail)
    if expected == "a list" and isinstance(value, str | int | float):
        expected = f"a list, such as [{_nearest_word(value, dotted)}]"
    if expected == "text" and isinstance(value, int | float):
        expected = f"text, {_in_quotes(value, dotted)}"
    meant = _MEANT_BY_TYPE.get((dotted, type(value)))
    if meant is not None:
        text = str(value).lower() if isinstance(value, bool) else value
        return [f"{dotted} is {text}, but has several settings; did you mean {dotted}.{meant}={text}?"]
    return [f"{dotted} is {value!r}; it must be {expected}."]


def _nearest_word(value: str | float, dotted: str) -> str | float:
    """Return the word that is nearest to a value in place of a list; the value itself if there is none."""
    nearest = difflib.get_close_matches(str(value), list(_WORDS.get(dotted, ())), n=1)
    return nearest[0] if nearest else value


def _in_quotes(value: float, dotted: str) -> str:
    """Write a text that YAML takes for a number, or for true or false; the shell removes the outer quotes."""
    text = str(value)
    if isinstance(value, bool):
        text = text.lower()
    quoted = f'"{text}"'
    if dotted.endswith("]"):
        return f"in quotes: {quoted}"
    return f"in quotes: {dotted}='{quoted}' on the command line, {quoted} in a file"


def _expected(detail: Any) -> str:
    if detail["type"] == "literal_error":
        return detail["ctx"]["expected"]
    message = detail["msg"].removeprefix("Input should be ").lower()
    return _EXPECTED.get(detail["type"].partition("_")[0]) or _EXPECTED.get(message, message)
