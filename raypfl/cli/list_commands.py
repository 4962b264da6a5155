"""The commands that show what there is, before anything runs: list, data show and plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from raypfl.cli.arguments import AsJson, Methods, Quiet, RecipeAndChanges, count, recipe_and_changes, source_and_changes
from raypfl.common.errors import ConfigError, did_you_mean

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
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]", help="Only this one, with what its options mean; of the settings, a section or a setting."
        ),
    ] = None,
) -> None:
    """List what an experiment can name, with options and defaults.

    `raypfl list methods ditto` describes one method and all its options.
    """
    if kind is None:
        raise ConfigError(f"Name what to list, as in `raypfl list methods`: {', '.join(CATALOGUES)}.")
    if kind not in CATALOGUES:
        raise ConfigError(f"{kind!r} cannot be listed; {did_you_mean(kind, CATALOGUES)}")

    from raypfl.cli.actions.listing import carry_out

    carry_out(CATALOGUES[kind], name)


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

    recipe, changes = recipe_and_changes(words or [], method, None, takes_seeds=False)
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
