"""The reference of all settings: type, default and description of each, from the docstrings of the sections."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from raypfl.experiment.docstrings import described_options
from raypfl.experiment.experiment import Experiment

_HEAD = """\
# Settings

<!-- Written by `python -m raypfl.experiment.reference > docs/settings.md`, from the docstrings of the sections. -->

Files group settings by section; commands use dotted names, as in `raypfl run training.lr=0.05`. `raypfl list settings`
prints this page.

For `data`, `partition`, `model`, `objective`, `method`, `attack`, `aggregation`, `compression`, `training.optimizer`,
`cohort.selection`, `devices.hardware`, `devices.availability` and the entries of `analyses` and `data.augmentation`, a
mapping with `name` and options can replace a name, as in `method: {name: ditto, lam: 1}`. `raypfl list methods`,
`raypfl list models` and so on print the options, and `raypfl list methods ditto` describes those of one method.

A setting that would have no effect is refused where it is set, such as `privacy.clip` without `privacy.noise`, or an
option that the code of a method never reads. A setting that a change leaves without effect returns to its default:
`training.steps=20` drops a recipe's `training.epochs`."""

_TYPE_NAMES = {bool: "true or false", int: "integer", float: "number", str: "text", dict: "mapping", NoneType: "null"}


def _documented(section: type) -> dict[str, str]:
    """Return the description of each setting of a section."""
    descriptions = described_options(section)
    # `options` is not a setting: options are written next to the component's name.
    descriptions.pop("options", None)
    return descriptions


def _type_name(hint: Any) -> str:
    """Name a type as YAML's readers know it; ``name`` stands for components."""
    origin = get_origin(hint)
    arguments = get_args(hint)
    if origin is Annotated:
        return _type_name(arguments[0])
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(_type_name, arguments)))
    if origin is tuple:
        return "list"
    return _TYPE_NAMES.get(origin or hint, "name")


class Settings:
    """All settings by their dotted names, in the order of the page."""

    def __init__(self) -> None:
        self._defaults = Experiment().to_dict()
        self._descriptions = _documented(Experiment)
        self._hints = get_type_hints(Experiment)

        for section in ("data", "model", *Experiment.model_fields):
            section_class = Experiment.model_fields[section].annotation
            if section in self._descriptions or not isinstance(section_class, type):
                continue
            for name, text in _documented(section_class).items():
                self._descriptions[f"{section}.{name}"] = text
            for name, hint in get_type_hints(section_class).items():
                self._hints[f"{section}.{name}"] = hint

    def __iter__(self) -> Iterator[str]:
        return iter(self._descriptions)

    def summary(self, name: str) -> str:
        """Return a setting's description."""
        return self._descriptions[name]

    def type(self, name: str) -> str:
        """Return the name of a setting's type, such as ``integer or null``."""
        return _type_name(self._hints[name])

    def default(self, name: str) -> str:
        """Return a setting's default as YAML; for a component, its name."""
        value = self._defaults
        for key in name.split("."):
            value = value[key]
        if isinstance(value, dict) and "name" in value:
            value = value["name"]
        return json.dumps(value)


SETTINGS = Settings()


def markdown() -> str:
    """Return the page of all settings, one table per section."""
    lines = [_HEAD]
    current_section = None

    for name in SETTINGS:
        section = name.rpartition(".")[0]
        if section != current_section:
            lines += _section_head(section)
            current_section = section
        lines.append(f"| `{name}` | {SETTINGS.type(name)} | `{SETTINGS.default(name)}` | {SETTINGS.summary(name)} |")

    return "\n".join(lines) + "\n"


def _section_head(section: str) -> list[str]:
    """Return the lines above a section's rows; an empty name stands for the experiment itself."""
    title = section or "The experiment"
    summary = "Settings outside of any section."
    if section:
        docstring = inspect.getdoc(Experiment.model_fields[section].annotation) or ""
        summary = docstring.partition("\n")[0].replace("``", "`")
    return [f"\n## {title}\n", summary, "\n| setting | type | default | description |\n|---|---|---|---|"]


if __name__ == "__main__":
    print(markdown(), end="")
