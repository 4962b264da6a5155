"""Docstrings as the API pages need them: ``name : meaning`` of their sections, on a line each."""

from __future__ import annotations

import re
from textwrap import indent
from typing import Any

import griffe

SECTION = re.compile(r"^(?:Attributes|Parameters|Raises)\n-+\n((?:.*\n?)*?)(?=^\w+\n-+\n|\Z)", re.MULTILINE)
ITEM = re.compile(r"^(\S.*?) : (.*(?:\n +.*)*)", re.MULTILINE)
RETURNS = re.compile(r"^(Returns\n-+\n)((?:.*\n?)*?)(?=^\w+\n-+\n|\Z)", re.MULTILINE)


class MeaningsNotTypes(griffe.Extension):
    """Types are in signatures here, so what follows a name is its meaning, as is the text on what is returned."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            text = SECTION.sub(lambda section: section[0].replace(section[1], items(section[1])), obj.docstring.value)
            kind = getattr(obj, "returns", None) or "result"
            obj.docstring.value = RETURNS.sub(lambda found: f"{found[1]}{kind}\n{indent(found[2], '    ')}", text)


def items(section: str) -> str:
    """An item for each name, with its meaning on the lines below."""
    return ITEM.sub(lambda item: "\n".join(f"{name}\n    {item[2]}" for name in item[1].split(", ")), section)
