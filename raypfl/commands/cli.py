"""The command line."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from raypfl.common.errors import ConfigError, RaypflError, Stopped
from raypfl.common.version import __version__

if TYPE_CHECKING:
    from raypfl.common.registry import Registry

STOPPED, WRONG, FAILED = 130, 2, 1  # exit codes; 130 is what a shell expects after Ctrl-C


class _Sentences(TyperGroup):
    """Ends a command that failed on purpose with a sentence and an exit code, not with a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (Stopped, KeyboardInterrupt) as stop:
            _say_error(str(stop) or "Stopped.", "yellow")
            raise typer.Exit(STOPPED) from None
        except RaypflError as error:
            _say_error(str(error), "red")
            raise typer.Exit(WRONG if isinstance(error, ConfigError) else FAILED) from None


app = typer.Typer(
    cls=_Sentences,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Personalized federated learning, simulated on Ray.",
)

data_app = typer.Typer(no_args_is_help=True, help="Look at the data that clients hold.")
app.add_typer(data_app, name="data")

Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="RECIPE|FILE.yaml KEY=VALUE", help="What to run, and what to change.", show_default=False),
]
DataWords = Annotated[
    list[str] | None,
    typer.Argument(metavar="RECIPE|FILE.yaml KEY=VALUE", help="Whose data, and what to change.", show_default=False),
]
StudyWords = Annotated[
    list[str] | None,
    typer.Argument(metavar="STUDY|FILE.yaml KEY=VALUE", help="Which study, and what to change.", show_default=False),
]
Changes = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings to change.", show_default=False)
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show the result only.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON; progress goes to stderr.")]


class Kind(StrEnum):
    """What can be listed."""

    methods = "methods"
    datasets = "datasets"
    models = "models"
    partitions = "partitions"
    augmentations = "augmentations"
    optimizers = "optimizers"
    objectives = "objectives"
    metrics = "metrics"
    recipes = "recipes"
    studies = "studies"


def main() -> None:
    """Entry point of the command ``raypfl``."""
    sys.path.insert(0, os.getcwd())  # where `my_module:MyMethod` is looked for, as under `python -m`
    app()


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"raypfl {__version__}")
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show it.")] = False,
) -> None:
    """Options of the command itself."""


@app.command()
def run(
    words: Words = None,
    method: Annotated[str, typer.Option(help="Methods to compare, as in: --method fedavg,ditto")] = "",
    seeds: Annotated[int | None, typer.Option(help="Seeds to run each method with.", min=1)] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Run an experiment or a comparison: a recipe by name, or your own YAML file. Without either: the recipe digits.

    KEY=VALUE changes a setting, such as training.lr=0.05 or method.lam=1.
    """
    from raypfl.commands import run as running
    from raypfl.config import experiments

    recipe, given = _named_and_changes(words or [], "digits")
    changes = [*given, f"methods={json.dumps(_names(method))}"] if method else given
    changes = [*changes, f"seeds={seeds}"] if seeds else changes
    planned = experiments(_source(recipe), changes)
    running.begin(planned, [recipe, *given], running.Shown(quiet, as_json))


@app.command()
def resume(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of the run, or of the comparison.", show_default=False)
    ],
    changes: Changes = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Go on with a run from its newest checkpoint, to the same result as if it had not been interrupted.

    Of a comparison, the run that was cut off goes on, and those that have not begun are begun. rounds=60 makes what is
    finished longer.
    """
    from raypfl.commands import run as running

    running.go_on(folder, changes or [], running.Shown(quiet, as_json))


@app.command()
def report(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="RUN...", help="Folders of runs, of comparisons, or with such in them."),
    ] = None,
    out: Annotated[Path, typer.Option(help="The page's file.")] = Path("report.html"),
) -> None:
    """Make one HTML page of runs, to be shown, printed and sent: results, curves, clients, data, bytes, settings."""
    from raypfl.report import found, write

    results, left_out = found(runs or [])
    for sentence in left_out:
        _say_error(sentence, "yellow")
    print(f"Report: {write(results, out, left_out)}")


@app.command()
def study(
    words: StudyWords = None,
    only: Annotated[str, typer.Option(help="Methods and settings to run, by their labels: --only fednh,cifar10")] = "",
    rounds: Annotated[int | None, typer.Option(help="Rounds of each run.", min=1)] = None,
    seeds: Annotated[int | None, typer.Option(help="Seeds of each method and setting.", min=1)] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Measure a published table and show both: a study by name, or your own YAML file. Without either: digits-personal.

    What is finished is not run again, and what was interrupted goes on. KEY=VALUE changes a setting of all runs.
    """
    from raypfl.commands import study as command

    source, changes = _named_and_changes(words or [], "digits-personal")
    changes += [f"{key}={count}" for key, count in (("rounds", rounds), ("seeds", seeds)) if count]
    command.carry_out(command.Order(source, _names(only), changes), quiet, as_json)


@app.command()
def track(
    folders: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders of runs or of comparisons.", show_default=False)
    ],
    uri: Annotated[str | None, typer.Option(help="MLflow's tracking URI; without it, the run's own.")] = None,
) -> None:
    """Record runs that are over in MLflow, such as those of a time when the tracking server could not be reached."""
    from raypfl.tracking import listener as mlflow

    for folder in folders:
        mlflow.track(folder, uri)


@app.command(name="list")
def list_(kind: Annotated[Kind, typer.Argument(help="What to list.", show_default=False)]) -> None:
    """List what an experiment can name, with options and their defaults."""
    Console().print(_listing(kind))


@data_app.command()
def show(
    words: DataWords = None,
    picture: Annotated[Path, typer.Option(help="The picture's file.")] = Path("data.png"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what each client of an experiment holds: a table, and a picture of clients and classes.

    The experiment is named as for raypfl run.
    """
    from raypfl.config import experiments
    from raypfl.data import load_federated, summarised
    from raypfl.results import data_picture, data_table

    recipe, changes = _named_and_changes(words or [], "digits")
    experiment = experiments(_source(recipe), changes)[0]
    summary = summarised(load_federated(experiment.data, experiment.partition, seed=experiment.seed))
    drawn = data_picture.draw(summary, picture)
    if as_json:
        print(json.dumps({**data_table.as_json(summary), "picture": str(drawn)}, indent=2))
    else:
        data_table.show(Console(), summary)
        print(f"Picture: {drawn}")


def _named_and_changes(words: Sequence[str], default: str) -> tuple[str, list[str]]:
    from raypfl.config.assignments import last_of_each

    first, *rest = words or [default]
    return (default, last_of_each(words)) if "=" in first else (first, last_of_each(rest))


def _names(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _source(recipe: str) -> str | dict[str, Any]:
    from raypfl.config.yaml_text import read
    from raypfl.recipes import RECIPES

    if not recipe.endswith((".yaml", ".yml")):
        return RECIPES.text(recipe)
    file = Path(recipe)
    return {"name": file.stem, **read(file)}


def _listing(kind: Kind) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("name", style="bold", no_wrap=True)
    table.add_column("what it is")
    table.add_column("options", style="dim")
    for row in _shelf_rows(kind) if kind in (Kind.recipes, Kind.studies) else _registry_rows(kind):
        table.add_row(*(Text(cell) for cell in row))
    return table


def _shelf_rows(kind: Kind) -> list[tuple[str, str, str]]:
    from raypfl.recipes import RECIPES
    from raypfl.studies import STUDIES

    shelf = RECIPES if kind is Kind.recipes else STUDIES
    return [(name, shelf.summary(name), "") for name in shelf.names()]


def _registry_rows(kind: Kind) -> list[tuple[str, str, str]]:
    from raypfl.data import PARTITIONS
    from raypfl.datasets import DATASETS
    from raypfl.methods import METHODS
    from raypfl.models import MODELS
    from raypfl.objectives import METRICS, OBJECTIVES
    from raypfl.optimizers import OPTIMIZERS
    from raypfl.training.augmentation import AUGMENTATIONS

    registry = {
        Kind.methods: METHODS,
        Kind.models: MODELS,
        Kind.partitions: PARTITIONS,
        Kind.augmentations: AUGMENTATIONS,
        Kind.datasets: DATASETS,
        Kind.optimizers: OPTIMIZERS,
        Kind.objectives: OBJECTIVES,
        Kind.metrics: METRICS,
    }[kind]
    return [(name, registry.summary(name), _options(registry, name)) for name in registry]


def _options(registry: Registry, name: str) -> str:
    """A line for each option; those of another registered method, which this one extends and leaves as they are, go
    under its name."""
    from raypfl.config.components import options_of
    from raypfl.config.experiment import GIVEN_BY_ENGINE

    entry = registry.get(name)
    known = {key: option.default for key, option in options_of(entry, ("config", *GIVEN_BY_ENGINE)).items()}
    bases = [base for base in getattr(entry, "__mro__", ())[1:] if (":" not in registry.name_of(base))]
    inherited = options_of(bases[0]) if bases else {}
    taken = {key for key, option in inherited.items() if key in known and option.default == known[key]}
    lines = [f"{key} = {default!r}" for key, default in known.items() if key not in taken]
    return "\n".join([*lines, *(f"and those of {registry.name_of(base)}" for base in bases[:1] if inherited)])


def _say_error(text: str, colour: str) -> None:
    Console(stderr=True).print(Text(text, colour), soft_wrap=True)
