"""The commands that show what there is, before anything runs: list, data show and plan."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from raypfl.cli.arguments import AsJson, Methods, Quiet, RecipeAndChanges, count, recipe_and_changes, source_and_changes
from raypfl.common.errors import ConfigError, did_you_mean
from raypfl.common.registry import Registry

CATALOGUES = {
    "methods": "raypfl.methods:METHODS",
    "asynchronous": "raypfl.runs.choices.asynchronous_methods:ASYNCHRONOUS_METHODS",
    "datasets": "raypfl.data.datasets:DATASETS",
    "models": "raypfl.models:MODELS",
    "partitions": "raypfl.data:PARTITIONS",
    "augmentations": "raypfl.learning.augmentation:AUGMENTATIONS",
    "optimizers": "raypfl.learning.optimizers:OPTIMIZERS",
    "objectives": "raypfl.learning.objectives:OBJECTIVES",
    "metrics": "raypfl.learning.objectives:METRICS",
    "analyses": "raypfl.analysis:ANALYSES",
    "selections": "raypfl.federation.selection:SELECTIONS",
    "attacks": "raypfl.federation.robustness:ATTACKS",
    "aggregations": "raypfl.federation.robustness:AGGREGATIONS",
    "compression": "raypfl.clients.compression:COMPRESSORS",
    "hardware": "raypfl.devices:HARDWARE",
    "availability": "raypfl.devices:AVAILABILITY_MODELS",
    "settings": "raypfl.experiment.reference:SETTINGS",
    "recipes": "raypfl.experiment.recipes:RECIPES",
    "studies": "raypfl.studies:STUDIES",
}
"""What `raypfl list` shows: kind -> ``module:attribute`` with names and summaries, imported only when it is listed."""


def list_catalogue(
    kind: Annotated[
        str | None,
        typer.Argument(metavar="KIND", help=f"{', '.join(CATALOGUES)}.", autocompletion=lambda: list(CATALOGUES)),
    ] = None,
    section: Annotated[
        str | None,
        typer.Argument(metavar="[SECTION]", help="Of the settings, only a section, such as training."),
    ] = None,
) -> None:
    """List what an experiment can name, with options and defaults."""
    if kind is None:
        raise ConfigError(f"Name what to list, as in `raypfl list methods`: {', '.join(CATALOGUES)}.")
    if kind not in CATALOGUES:
        raise ConfigError(f"{kind!r} cannot be listed; {did_you_mean(kind, CATALOGUES)}")
    module, attribute = CATALOGUES[kind].split(":")
    catalogue = getattr(importlib.import_module(module), attribute)
    heading, details = _third_column(kind, catalogue)

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("name", style="bold", no_wrap=True)
    table.add_column("what it is")
    table.add_column(heading, style="dim")
    for name in _names(kind, catalogue, section):
        # Docstrings and the page of settings mark code with backticks.
        table.add_row(Text(name), Text(catalogue.summary(name).replace("`", "")), Text(details(name)))
    Console().print(table)


def plan(
    words: RecipeAndChanges = None,
    method: Methods = "",
    clients: Annotated[
        int | None,
        typer.Option(
            metavar="N", parser=count, help="Number of clients, which hold in turn what those of the data do."
        ),
    ] = None,
    picture: Annotated[Path, typer.Option(help="File of the picture.")] = Path("plan.png"),
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Plan a run on its clients' devices before anything trains: rounds a day, traffic, energy, and who takes part.

    Name the experiment as for raypfl run, with devices.hardware; each method of a comparison is planned. The picture is
    plan.png in the current folder unless --picture names another file; of several plans, plan-1.png and so on. With
    --clients, give the cohort as cohort.fraction.
    """
    from raypfl.cli.actions.plan import carry_out
    from raypfl.experiment import experiments
    from raypfl.experiment.recipes import settings_of

    recipe, changes = recipe_and_changes(words or [], method, None)
    carry_out(experiments(settings_of(recipe), changes), clients, picture, quiet, as_json)


def show_data(
    words: RecipeAndChanges = None,
    picture: Annotated[Path, typer.Option(help="File of the picture.")] = Path("data.png"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Show the samples of each client of an experiment: a table, and a picture of clients and classes.

    Name the experiment as for raypfl run.
    """
    from raypfl.data import summarised
    from raypfl.experiment import experiments
    from raypfl.experiment.recipes import RECIPES, settings_of
    from raypfl.results import client_data

    recipe, changes = source_and_changes(words or [], "digits", RECIPES)
    experiment = experiments(settings_of(recipe), changes)[0]
    summary = summarised(experiment.load_data())
    picture_file = client_data.draw(summary, picture)

    if as_json:
        print(json.dumps({**client_data.as_json(summary), "picture": str(picture_file)}, indent=2))
    else:
        client_data.show(Console(), summary)
        print(f"Picture: {picture_file}")


def _names(kind: str, catalogue: Any, section: str | None) -> list[str]:
    """Return the names to list: all, or the settings of one section.

    Raises
    ------
    ConfigError : if there is no such section, or what is listed has none.
    """
    names = list(catalogue)
    if section is None:
        return names
    if kind != "settings":
        raise ConfigError(
            f"Only settings have sections, such as `raypfl list settings training`; leave {section!r} out."
        )

    chosen = [name for name in names if name.startswith(f"{section}.")]
    if not chosen:
        sections = {name.partition(".")[0] for name in names if "." in name}
        raise ConfigError(f"There is no section {section!r} of settings; {did_you_mean(section, sections)}")
    return chosen


def _third_column(kind: str, catalogue: Any) -> tuple[str, Callable[[str], str]]:
    """Return the heading of the last column, and a function from a name to its text."""
    if kind == "settings":
        return "default", catalogue.default
    if isinstance(catalogue, Registry):
        return "options", partial(_options, catalogue)
    return "options", lambda name: ""


def _options(registry: Registry, name: str) -> str:
    """Return a line for each option; options inherited unchanged from a registered method go under its name."""
    from raypfl.experiment.components import GIVEN_BY_ENGINE, Option, options_of
    from raypfl.experiment.parts import to_plain

    entry = registry.get(name)
    parameters = options_of(entry, ("config", "member", *GIVEN_BY_ENGINE))
    defaults = {key: option.default for key, option in parameters.items()}

    ancestors = getattr(entry, "__mro__", ())[1:]
    base = next((ancestor for ancestor in ancestors if ":" not in registry.name_of(ancestor)), None)
    inherited = options_of(base) if base else {}

    lines = []
    for key, default in defaults.items():
        is_unchanged = key in inherited and inherited[key].default == default
        if is_unchanged:
            continue
        if default is Option.empty:
            lines.append(f"{key}, required")
        else:
            # As in a file or command: null, and not None.
            lines.append(f"{key} = {json.dumps(to_plain(default))}")
    if inherited:
        lines.append(f"and those of {registry.name_of(base)}")
    return "\n".join(lines)
