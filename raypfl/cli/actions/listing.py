"""`raypfl list`: a table of what an experiment can name, or one of these with what its options mean."""

from __future__ import annotations

import importlib
import json
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from raypfl.common.errors import ConfigError, did_you_mean
from raypfl.common.packaged_yaml import Packaged
from raypfl.common.registry import Registry
from raypfl.experiment.checks.hints import suggestion
from raypfl.experiment.components import GIVEN_BY_ENGINE, Option, options_of
from raypfl.experiment.docstrings import described_options, prose
from raypfl.experiment.identity import is_in
from raypfl.experiment.parts import to_plain
from raypfl.experiment.reference import Settings

_NO_OPTIONS = ("config", "member", *GIVEN_BY_ENGINE)


def carry_out(source: str, name: str | None) -> None:
    """Print all entries of a catalogue, or the one called `name`; of the settings, a section or a setting.

    Parameters
    ----------
    source : ``module:attribute`` of the catalogue, which has names and summaries.
    """
    module, _, attribute = source.partition(":")
    catalogue = getattr(importlib.import_module(module), attribute)
    console = Console()

    if isinstance(catalogue, Registry):
        console.print(_components(catalogue) if name is None else _component(catalogue, name))
    elif isinstance(catalogue, Packaged):
        if name is None:
            console.print(_summaries(catalogue))
        else:
            print(catalogue.text(name), end="")
    elif isinstance(catalogue, Settings):
        console.print(_settings(catalogue, name))
    else:
        console.print(_summaries(catalogue, name))


def _table(*headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        table.add_column(heading, style="bold" if heading == "name" else None, no_wrap=heading == "name")
    return table


def _summaries(catalogue: Any, only: str | None = None) -> Table:
    """Return a table of names and summaries.

    Raises
    ------
    ConfigError : if there is no entry called `only`.
    """
    if only is not None and only not in catalogue:
        raise ConfigError(f"There is no entry called {only!r}; {did_you_mean(only, catalogue)}")

    table = _table("name", "what it is")
    for name in catalogue if only is None else [only]:
        table.add_row(*map(_plain, [name, catalogue.summary(name)]))
    return table


def _components(registry: Registry) -> Table:
    table = _table("name", "what it is", "options")
    for name in registry:
        table.add_row(*map(_plain, [name, registry.summary(name), _options(registry, name)]))
    return table


def _component(registry: Registry, name: str) -> Group:
    """Return the description of one component, with all of its options: first its own, then those that it inherits."""
    entry = registry.get(name)
    own_options, inherited = _own_and_inherited(registry, entry)
    descriptions = described_options(entry)

    table = _table("option", "default", "what it is")
    for key, option in {**own_options, **inherited}.items():
        default = "required" if option.default is Option.empty else _as_yaml(option.default)
        table.add_row(*map(_plain, [key, default, descriptions.get(key, "")]))
    family = f"{name.partition(':')[0]}:NAME"
    text = prose(entry) or (prose(registry.get(family)) if family in registry else "It has no docstring.")
    return Group(_plain(text), *([table] if table.rows else []))


def _settings(settings: Settings, name: str | None) -> Table:
    """Return a table of all settings, of one section's, or of those that have a name with or without their section.

    Raises
    ------
    ConfigError : if there is neither a section nor a setting called `name`.
    """
    chosen = [setting for setting in settings if name is None or is_in(setting, name)]
    chosen = chosen or [setting for setting in settings if setting.endswith(f".{name}")]
    if not chosen:
        sections = {setting.partition(".")[0] for setting in settings if "." in setting}
        kind = "setting" if "." in str(name) else "section or setting"
        candidates = settings if kind == "setting" else sections
        hint = suggestion(str(name)) or did_you_mean(str(name), candidates)
        raise ConfigError(f"There is no {kind} {name!r}; {hint}")

    table = _table("name", "what it is", "default")
    for setting in chosen:
        table.add_row(*map(_plain, [setting, settings.summary(setting), settings.default(setting)]))
    return table


def _options(registry: Registry, name: str) -> str:
    """Return a line for each option; those inherited unchanged from a registered method go under its name."""
    entry = registry.get(name)
    own_options, _ = _own_and_inherited(registry, entry)

    lines = []
    for key, option in own_options.items():
        lines.append(f"{key}, required" if option.default is Option.empty else f"{key} = {_as_yaml(option.default)}")
    base = _registered_base(registry, entry)
    if base and options_of(base):
        lines.append(f"and those of {registry.name_of(base)}")
    return "\n".join(lines)


def _own_and_inherited(registry: Registry, entry: Any) -> tuple[dict[str, Option], dict[str, Option]]:
    """Return a component's options, apart from those with the default that they have in its registered base class."""
    base = _registered_base(registry, entry)
    of_base = options_of(base) if base else {}

    own_options = options_of(entry, _NO_OPTIONS)
    inherited = {
        key: own_options.pop(key)
        for key in of_base
        if key in own_options and own_options[key].default == of_base[key].default
    }
    return own_options, inherited


def _registered_base(registry: Registry, entry: Any) -> type | None:
    ancestors = getattr(entry, "__mro__", ())[1:]
    return next((ancestor for ancestor in ancestors if ":" not in registry.name_of(ancestor)), None)


def _as_yaml(default: Any) -> str:
    """Return a default as in a file or command: null, and not None."""
    return json.dumps(to_plain(default))


def _plain(text: str) -> Text:
    """Return text without the backticks that mark code in docstrings."""
    return Text(text.replace("`", ""))
