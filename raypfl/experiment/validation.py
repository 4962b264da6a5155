"""The errors that pydantic found, as sentences with dotted paths."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import lru_cache
from textwrap import indent
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from pydantic import ValidationError

KeyPath = tuple[int | str, ...]

_EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "tuple": "a list",
    "list": "a list",
    "an instance of sequence": "a list",
    "dict": "options as 'key: value'",
    "dataclass": "options as 'key: value'",
}


class Mistakes(ValueError):
    """Several mistakes in one value, a sentence each, which pydantic reports with all others."""

    def __init__(self, lines: Sequence[str]):
        super().__init__("\n".join(lines))
        self.lines = list(lines)


def validation_mistakes(error: ValidationError, unknown: Callable[[KeyPath], str], prefix: KeyPath = ()) -> list[str]:
    """One sentence for each mistake.

    Parameters
    ----------
    unknown : what to say after the path of an unknown key: ``"is not an option of ditto; did you mean 'lam'?"``.
    prefix : path of the value that was validated.
    """
    return [line for detail in error.errors() for line in _sentence(detail, unknown, prefix)]


def one_message(lines: list[str], subject: str) -> str:
    """A single sentence unchanged, several as a list; a traceback is below its sentence."""
    if len(lines) == 1:
        return lines[0]
    return "\n  - ".join([f"{subject} has {len(lines)} mistakes:", *(indent(line, "    ").lstrip() for line in lines)])


def boolean_mistakes(hint: Any, value: Any, where: str) -> list[str]:
    """A sentence for each true or false in place of a number, for which pydantic would take 1 or 0.

    Parameters
    ----------
    hint : the declared type of `value`. where : its dotted path.
    """
    kinds = _alternatives(hint)
    if isinstance(value, bool):
        expected = [said for kind, said in ((float, "a number"), (int, "a whole number")) if kind in kinds]
        return [f"{where} is {value}; it must be {expected[0]}."] if expected and bool not in kinds else []
    inside: list[tuple[Any, Any, str]] = []
    for kind in kinds:
        arguments = get_args(kind)
        if isinstance(kind, type) and dataclasses.is_dataclass(kind) and isinstance(value, dict):
            inside += [(_hints(kind).get(key), inner, f"{where}.{key}") for key, inner in value.items()]
        elif get_origin(kind) is dict and isinstance(value, dict):
            inside += [(arguments[1], inner, f"{where}.{key}") for key, inner in value.items()]
        elif arguments and get_origin(kind) is not dict and isinstance(value, list | tuple):
            inside += [(arguments[0], inner, f"{where}[{i}]") for i, inner in enumerate(value)]
    return [line for part in inside for line in boolean_mistakes(*part)]


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """The types that a union allows, or the only one."""
    if get_origin(hint) is Annotated:
        return _alternatives(get_args(hint)[0])
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


@lru_cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _sentence(detail: Any, unknown: Callable[[KeyPath], str], prefix: KeyPath) -> list[str]:
    kind, path = detail["type"], (*prefix, *detail["loc"])
    # ("training", "milestones", 0) is training.milestones[0].
    dotted = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
    if kind == "value_error":
        raised = detail["ctx"]["error"]
        return raised.lines if isinstance(raised, Mistakes) else [str(raised)]
    if kind in {"extra_forbidden", "unexpected_keyword_argument"}:
        return [f"{dotted} {unknown(path)}"]
    if kind in {"missing", "missing_argument"}:
        return [f"{dotted} is needed and has no default."]
    expected = _expected(detail)
    if expected == "a list" and isinstance(detail["input"], str):
        expected = f"a list, such as [{detail['input']}]"
    return [f"{dotted} is {detail['input']!r}; it must be {expected}."]


def _expected(detail: Any) -> str:
    if detail["type"] == "literal_error":
        return detail["ctx"]["expected"]
    message = detail["msg"].removeprefix("Input should be ").lower()
    return _EXPECTED.get(detail["type"].partition("_")[0]) or _EXPECTED.get(message, message)
