"""All settings of an experiment, each with its type, its default and what the docstring of its section says."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from raypfl.experiment.experiment import Experiment

_HEAD = """\
# Settings

<!-- Written by `python -m raypfl.experiment.reference > docs/settings.md`, from the docstrings of the sections. -->

A file has them by section, the command line by dotted name, as in `raypfl run training.lr=0.05`. `raypfl list settings`
prints this page. A `name` may also be options with one, as in `method: {name: ditto, lam: 1}`. `data`, `partition`,
`model`, `objective`, `method`, `training.optimizer` and `data.augmentation` have options of their own, which
`raypfl list methods` and the like print.

A setting that would have no effect is refused where it is set, such as `privacy.clip` without `privacy.noise`, or an
option that the code of a method never reads. What a change leaves without effect gets its default again:
`training.steps=20` drops a recipe's `training.epochs`."""


def _documented(kind: type) -> dict[str, str]:
    """What the docstrings of a class and its bases say of each attribute but `options`."""
    texts: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        attributes = inspect.cleandoc(vars(one).get("__doc__") or "").partition("Attributes\n----------\n")[2]
        for line in re.sub(r"\n\s+", " ", attributes.partition("\n\n")[0]).splitlines():
            names, _, text = line.partition(" : ")
            text = text.replace("``", "`").replace(":class:", "").replace("None:", "null:")  # as in YAML and Markdown
            texts |= dict.fromkeys(names.split(", "), text)
    return {name: text for name, text in texts.items() if name != "options"}


_TYPES = {bool: "true or false", int: "integer", float: "number", str: "text", dict: "mapping", NoneType: "null"}


def _said(hint: Any) -> str:
    """A type as a reader of YAML knows it; ``name`` for components, which are given by a name, or options with one."""
    origin, inside = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _said(inside[0])
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in inside)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(_said, inside)))
    if origin is tuple:
        return "list"
    return _TYPES.get(origin or hint, "name")


class Settings:
    """Settings by their dotted names, in order."""

    def __init__(self) -> None:
        self._defaults = Experiment().to_dict()
        self._texts = _documented(Experiment)
        self._hints = get_type_hints(Experiment)
        for section in ("data", "model", *Experiment.model_fields):
            kind = Experiment.model_fields[section].annotation
            if section not in self._texts and isinstance(kind, type):
                self._texts |= {f"{section}.{name}": text for name, text in _documented(kind).items()}
                self._hints |= {f"{section}.{name}": hint for name, hint in get_type_hints(kind).items()}

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def summary(self, name: str) -> str:
        """What a setting is."""
        return self._texts[name]

    def type(self, name: str) -> str:
        """What values it takes."""
        return _said(self._hints[name])

    def default(self, name: str) -> str:
        """Its default, as YAML; of a component, its name."""
        value = self._defaults
        for key in name.split("."):
            value = value[key]
        return json.dumps(value["name"] if isinstance(value, dict) and "name" in value else value)


SETTINGS = Settings()


def markdown() -> str:
    """The page of all settings."""
    lines = [_HEAD]
    section = None
    for name in SETTINGS:
        if section != (section := name.rpartition(".")[0]):
            kind = Experiment.model_fields[section].annotation if section else None
            about = (inspect.getdoc(kind) or "").partition("\n")[0] if kind else "Settings outside of any section."
            lines += [
                f"\n## {section or 'The experiment'}\n",
                about,
                "\n| setting | type | default | |\n|---|---|---|---|",
            ]
        lines.append(f"| `{name}` | {SETTINGS.type(name)} | `{SETTINGS.default(name)}` | {SETTINGS.summary(name)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
