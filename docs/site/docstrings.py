"""Docstrings as the API pages need them: sections with each name on a line, and its meaning on the lines below."""

from __future__ import annotations

import re
from textwrap import indent
from typing import Any

import griffe

SECTION = re.compile(r"^(?:Attributes|Parameters|Raises)\n-+\n((?:.*\n?)*?)(?=^\w+\n-+\n|\Z)", re.MULTILINE)
ITEM = re.compile(r"^(\S.*?) : (.*(?:\n +.*)*)", re.MULTILINE)
RETURNS = re.compile(r"^(Returns\n-+\n)((?:.*\n?)*?)(?=^\w+\n-+\n|\Z)", re.MULTILINE)


class MeaningsNotTypes(griffe.Extension):
    """Show the text after a name, or below Returns, as its meaning, which griffe would take for a type."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            text = SECTION.sub(lambda match: match[0].replace(match[1], items(match[1])), obj.docstring.value)
            kind = getattr(obj, "returns", None) or "result"
            obj.docstring.value = RETURNS.sub(lambda match: f"{match[1]}{kind}\n{indent(match[2], '    ')}", text)


def items(section: str) -> str:
    """Return a section with an item for each name, and the name's meaning on the lines below it."""

    def as_items(match: re.Match[str]) -> str:
        names, meaning = match.groups()
        return "\n".join(f"{name}\n    {meaning}" for name in names.split(", "))

    return ITEM.sub(as_items, section)
