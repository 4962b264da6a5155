"""What the docstrings of settings and components say, for readers who know Markdown and YAML."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from raypfl.common.registry import docstring_of

_SECTIONS = ("Attributes", "Parameters")


def described_options(entry: Callable[..., Any]) -> dict[str, str]:
    """Return what the docstring of a function, or those of a class and its bases, say about each option.

    They say it in the sections ``Attributes`` and ``Parameters``.
    """
    descriptions: dict[str, str] = {}
    for documented in reversed(getattr(entry, "__mro__", (entry,))):
        docstring = docstring_of(documented)
        for section in _SECTIONS:
            text = docstring.partition(f"{section}\n{'-' * len(section)}\n")[2].partition("\n\n")[0]
            one_line_each = re.sub(r"\n\s+", " ", text)
            for line in one_line_each.splitlines():
                names, _, description = line.partition(" : ")
                description = _as_markdown(description).replace("None:", "null:")
                description = description[:1].upper() + description[1:]
                descriptions |= dict.fromkeys(names.split(", "), description)

    return descriptions


def prose(entry: Callable[..., Any]) -> str:
    """Return a docstring without its sections, with a line for each paragraph; indented lines and lists stay."""
    text = re.split(r"\n\n\w+\n---+\n", docstring_of(entry))[0]
    return _as_markdown(re.sub(r"(?<=\S)\n(?=[^\s*-])", " ", text))


def _as_markdown(text: str) -> str:
    return re.sub(r":\w+:(?=`)", "", text.replace("``", "`"))
