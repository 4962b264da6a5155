"""The errors that pydantic found, as sentences with dotted paths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from textwrap import indent
from typing import Any

from pydantic import ValidationError

Path = tuple[int | str, ...]

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


def sentences(error: ValidationError, unknown: Callable[[Path], str], prefix: Path = ()) -> list[str]:
    """One sentence for each mistake.

    Parameters
    ----------
    unknown : what to say after the path of an unknown key: ``"is not an option of ditto; did you mean 'lam'?"``.
    prefix : path of the value that was validated.
    """
    return [line for detail in error.errors() for line in _sentence(detail, unknown, prefix)]


def listed(lines: list[str], subject: str) -> str:
    """A single sentence unchanged, several as a list; a traceback is below its sentence."""
    if len(lines) == 1:
        return lines[0]
    return "\n  - ".join([f"{subject} has {len(lines)} mistakes:", *(indent(line, "    ").lstrip() for line in lines)])


def _sentence(detail: Any, unknown: Callable[[Path], str], prefix: Path) -> list[str]:
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
