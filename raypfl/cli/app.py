"""The command line."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from raypfl.common.errors import ConfigError, RaypflError, Refused, Stopped, did_you_mean
from raypfl.common.registry import Registry
from raypfl.common.user_code import framed
from raypfl.common.version import __version__

if TYPE_CHECKING:
    from raypfl.experiment import Experiment

STOPPED, WRONG, FAILED = 130, 2, 1  # exit codes; 130 is what a shell expects after Ctrl-C


LISTED = {
    "methods": "raypfl.methods:METHODS",
    "datasets": "raypfl.data.datasets:DATASETS",
    "models": "raypfl.models:MODELS",
    "partitions": "raypfl.data:PARTITIONS",
    "augmentations": "raypfl.learning.augmentation:AUGMENTATIONS",
    "optimizers": "raypfl.learning.optimizers:OPTIMIZERS",
    "objectives": "raypfl.learning.objectives:OBJECTIVES",
    "metrics": "raypfl.learning.objectives:METRICS",
    "analyses": "raypfl.analysis:ANALYSES",
    "settings": "raypfl.experiment.reference:SETTINGS",
    "recipes": "raypfl.experiment.recipes:RECIPES",
    "studies": "raypfl.studies:STUDIES",
}
"""What can be listed, and where its names and summaries are."""


class _Sentences(TyperGroup):
    """Prints the errors and warnings of a command as sentences, without a traceback or a line of code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.showwarning = partial(_show_warning, warnings.showwarning, set())
                with framed():
                    return super().invoke(ctx)
        except (Stopped, KeyboardInterrupt) as stop:
            _print_error(str(stop) or "Stopped.", "yellow")
            raise typer.Exit(STOPPED) from None
        except RaypflError as error:
            _print_error(str(error), "red")
            raise typer.Exit(WRONG if isinstance(error, Refused) else FAILED) from None


app = typer.Typer(
    cls=_Sentences,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Personalized federated learning, simulated on Ray.",
)

data_app = typer.Typer(no_args_is_help=True, help="Look at the data that clients hold.")
app.add_typer(data_app, name="data")

_KEEP_UNKNOWN = {"ignore_unknown_options": True}  # among the words, where `_refuse_options` finds them

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RECIPE|FILE.yaml KEY=VALUE", help="The experiment, and settings to change.", show_default=False
    ),
]
StudyWords = Annotated[
    list[str] | None,
    typer.Argument(metavar="STUDY|FILE.yaml KEY=VALUE", help="The study, and settings to change.", show_default=False),
]
Changes = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings to change.", show_default=False)
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show the result only, without progress.")]
Kind = Literal["run", "tune", "study"]
Address = Annotated[
    str | None,
    typer.Option(
        metavar="URL", help="The cluster's dashboard, http://HEAD:8265; by default $RAY_ADDRESS.", show_default=False
    ),
]
JobId = Annotated[str, typer.Argument(metavar="ID", help="The job, as raypfl jobs lists it.", show_default=False)]
Baseline = Annotated[
    str | None,
    typer.Option(
        metavar="METHOD", help="Method that the others are compared with; by default the best.", show_default=False
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON; progress goes to stderr.")]


def main() -> None:
    """Entry point of the command ``raypfl``."""
    sys.path.insert(0, os.getcwd())  # so that `my_module:MyMethod` is found, as under `python -m`
    app()


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"raypfl {__version__}")
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Options of the command itself."""


@app.command(context_settings=_KEEP_UNKNOWN)
def run(
    words: Words = None,
    method: Annotated[str, typer.Option(help="Methods to compare, as in: --method fedavg,ditto")] = "",
    seeds: Annotated[int | None, typer.Option(help="Seeds to run each method with.", min=1)] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder of the run. If the run is there already, it continues."),
    ] = None,
    baseline: Baseline = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Run an experiment or a comparison: a recipe by name (default: digits) or your own YAML file.

    KEY=VALUE changes a setting, such as training.lr=0.05 or method.lam=1.
    """
    from raypfl.cli.run import run_experiments
    from raypfl.experiment import experiments
    from raypfl.experiment.recipes import settings_of

    recipe, changes = _recipe_and_changes(words or [], method, seeds)
    planned = experiments(settings_of(recipe), changes)
    if not quiet and _other_data(words or [], changes):
        _print_error(_rest_of_recipe(planned), "yellow")
    run_experiments(planned, [recipe, *changes], run_dir, quiet, as_json, baseline=baseline)


@app.command(context_settings=_KEEP_UNKNOWN)
def resume(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run or comparison.", show_default=False)],
    changes: Changes = None,
    from_round: Annotated[
        int | None, typer.Option(help="Continue as a new run, after this round, of which there is a checkpoint.", min=1)
    ] = None,
    new_run: Annotated[Path | None, typer.Option("--as", metavar="FOLDER", help="Folder of that new run.")] = None,
    baseline: Baseline = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Continue a run from its newest checkpoint, to the same result as without the interruption.

    In a comparison, the interrupted run continues and the remaining ones start. rounds=60 extends what is finished.
    Other settings that decide the result stay; with --from-round 4 --as FOLDER, a new run continues with changed ones.
    """
    from raypfl.cli.run import continue_as_new, resume_folder

    _refuse_options(changes or [])
    if from_round is None and new_run is None:
        resume_folder(folder, changes or [], quiet, as_json, baseline)
    elif from_round is None:
        raise ConfigError("--as needs --from-round: after which round the new run continues, as in --from-round 4.")
    elif new_run is None:
        raise ConfigError("--from-round needs --as: the folder of the new run, as in --as runs/lower-rate.")
    elif baseline is not None:
        raise ConfigError("--baseline is for comparisons, and --from-round continues a single run; leave one out.")
    else:
        continue_as_new(folder, from_round, new_run, changes or [], quiet, as_json)


@app.command(context_settings=_KEEP_UNKNOWN)
def pretrain(words: Words = None, quiet: Quiet = False, as_json: AsJson = False) -> None:
    """Train a network on a pool that is no client's (model.pretrain), as a run would before its first round.

    The file of weights is kept in data.cache, where runs that would train the same network in the same way find it.
    """
    from raypfl.cli.pretrain import carry_out
    from raypfl.experiment import experiments
    from raypfl.experiment.recipes import settings_of

    recipe, changes = _recipe_and_changes(words or [], "", None)
    carry_out(experiments(settings_of(recipe), changes)[0], quiet, as_json)


@app.command()
def report(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="RUN...", help="Folders of runs, comparisons or sweeps, or folders that contain some."),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="File to write: a page or, if it ends in .tex or .csv, the table of results.")
    ] = Path("report.html"),
    baseline: Baseline = None,
) -> None:
    """Write one HTML page about runs, to show, print or send: results, curves, clients, data, bytes, settings.

    --out table.tex writes the table of results as LaTeX, and --out table.csv as CSV.
    """
    from raypfl.results.report import found, write
    from raypfl.results.report.sweeps import is_sweep

    results, left_out = found(runs or [])
    for sentence in left_out:
        _print_error(sentence, "yellow")
    sweeps = [folder for folder in runs or [] if is_sweep(folder)]
    print(f"Report: {write(results, out, left_out, sweeps, baseline)}")


@app.command(context_settings=_KEEP_UNKNOWN)
def study(
    words: StudyWords = None,
    only: Annotated[str, typer.Option(help="Methods and settings to run, by label, as in: --only fednh,cifar10")] = "",
    rounds: Annotated[int | None, typer.Option(help="Rounds of each run.", min=1)] = None,
    seeds: Annotated[int | None, typer.Option(help="Seeds of each method and setting.", min=1)] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Measure a published table and show both: a study by name (default: digits-personal) or your own YAML file.

    Finished runs are not repeated, interrupted ones continue. KEY=VALUE changes a setting of all runs.
    """
    from raypfl.cli.study import run_study

    source, changes = _study_and_changes(words or [], rounds, seeds)
    run_study(source, _names(only), changes, quiet, as_json)


@app.command(context_settings=_KEEP_UNKNOWN)
def ntk(
    source: Annotated[
        str,
        typer.Argument(metavar="RUN|RECIPE", help="A run's or comparison's folder, or a recipe.", show_default=False),
    ],
    changes: Changes = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Say why training converges or does not, by its neural tangent kernel: of a finished run, or a recipe to run.

    KEY=VALUE changes a setting of the recipe.
    """
    from raypfl.cli.ntk import ntk as show_ntk

    _refuse_options(changes or [])
    show_ntk(source, changes or [], quiet, as_json)


@app.command()
def tune(
    source: Annotated[str, typer.Argument(metavar="FILE", help="A sweep's YAML file.", show_default=False)],
    changes: Changes = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Search settings of an experiment with Ray Tune, as a sweep's YAML file says.

    A sweep that was interrupted continues. KEY=VALUE changes the sweep (trials=20) or its experiment (rounds=10).
    """
    from raypfl.cli import tune as command

    command.carry_out(source, changes or [], quiet, as_json)


@app.command(context_settings=_KEEP_UNKNOWN)
def submit(
    kind: Annotated[Kind, typer.Argument(help="What the job does.", show_default=False)],
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="WORDS", help="As after raypfl run, tune or study.", show_default=False),
    ] = None,
    address: Address = None,
    detach: Annotated[bool, typer.Option("--detach", help="Return once the job is submitted.")] = False,
) -> None:
    """Run, tune or study as a job of a Ray cluster, and follow it to its end and exit code.

    The job takes along the description and your own modules. Results go to output=/FOLDER, which must outlive the job.
    A job that is submitted again with the same --run-dir (a study or sweep: the same output) continues.
    """
    from raypfl.cli import jobs as command
    from raypfl.integrations.jobs.description import Description

    words = words or []
    given = typer.main.get_command(app).commands[kind].make_context(kind, list(words)).params  # type: ignore[attr-defined]
    if kind == "run":
        about = Description.of_run(*_recipe_and_changes(given["words"] or [], given["method"], given["seeds"]))
    elif kind == "study":
        source, changes = _study_and_changes(given["words"] or [], given["rounds"], given["seeds"])
        about = Description.of_study(source, _names(given["only"]), changes)
    else:
        about = Description.of_sweep(given["source"], given["changes"] or [])
    raise typer.Exit(command.submit(kind, words, about, given.get("run_dir"), address, detach))


@app.command()
def jobs(address: Address = None, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the jobs of a Ray cluster, the newest first."""
    from raypfl.cli import jobs as command

    command.jobs(address, as_json)


@app.command()
def logs(
    job: JobId, address: Address = None, follow: Annotated[bool, typer.Option(help="Until the job ends.")] = False
) -> None:
    """Print a job's log. With --follow, the exit code is the job's."""
    from raypfl.cli import jobs as command

    raise typer.Exit(command.logs(job, address, follow))


@app.command()
def stop(job: JobId, address: Address = None) -> None:
    """Stop a job. Its finished rounds are saved, and submitted again with the same folder it continues."""
    from raypfl.cli import jobs as command

    command.stop(job, address)


@app.command()
def personalize(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.", show_default=False)],
    data: Annotated[
        Path,
        typer.Option(metavar="PATH", help="Its samples: a .npz file with x and y, or a folder.", show_default=False),
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="File of the model.")] = Path("model.safetensors"),
    held_out: Annotated[float, typer.Option(help="Share of the samples to test the model on.", min=0)] = 0.25,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Make a model for a new client from some labelled samples, by the run's method, and write it as safetensors.

    A folder has images in a folder for each class, or files like those that the run's data set was read from.
    """
    from raypfl.cli import personalize as command

    command.personalize(run, data, out, held_out, as_json)


@app.command()
def serve(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.", show_default=False)],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=1, max=65535)] = 8000,
    replicas: Annotated[int, typer.Option(help="Processes that make models.", min=1)] = 1,
    max_mb: Annotated[float, typer.Option(help="Megabytes of a request, at most.", min=0.001)] = 10.0,
    max_samples: Annotated[int, typer.Option(help="Samples of a request, at most.", min=1)] = 1000,
) -> None:
    """Make models for new clients over HTTP, through Ray Serve (pip install 'raypfl\\[serve]').

    Requests need a token: that of $RAYPFL_TOKEN, or a new one, which is printed.
    """
    from raypfl.cli import personalize as command

    command.serve(run, host, port, replicas, max_mb, max_samples)


@app.command()
def track(
    folders: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders of runs or comparisons.", show_default=False)
    ],
    uri: Annotated[str | None, typer.Option(help="MLflow's tracking URI; by default the run's own.")] = None,
) -> None:
    """Record finished runs in MLflow, for instance if the tracking server could not be reached at the time."""
    from raypfl.integrations.tracking import listener

    for folder in folders:
        listener.track(folder, uri)


@app.command(name="list")
def list_(
    kind: Annotated[
        str, typer.Argument(metavar="|".join(LISTED), help="What to list.", autocompletion=lambda: list(LISTED))
    ],
) -> None:
    """List what an experiment can name, with options and their defaults."""
    if kind not in LISTED:
        raise ConfigError(f"{kind!r} cannot be listed; {did_you_mean(kind, LISTED)}")
    module, name = LISTED[kind].split(":")
    source = getattr(importlib.import_module(module), name)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("name", style="bold", no_wrap=True)
    table.add_column("what it is")
    table.add_column("default" if kind == "settings" else "options", style="dim")
    details = partial(_options, source) if hasattr(source, "get") else getattr(source, "default", lambda name: "")
    for name in source:
        table.add_row(*map(Text, (name, source.summary(name), details(name))))
    Console().print(table)


@data_app.command(context_settings=_KEEP_UNKNOWN)
def show(
    words: Words = None,
    picture: Annotated[Path, typer.Option(help="Picture to write.")] = Path("data.png"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what each client of an experiment holds: a table, and a picture of clients and classes.

    The experiment is given as for raypfl run.
    """
    from raypfl.data import load_federated, summarised
    from raypfl.experiment import experiments
    from raypfl.experiment.recipes import settings_of
    from raypfl.results import client_data

    recipe, changes = _named_and_changes(words or [], "digits")
    experiment = experiments(settings_of(recipe), changes)[0]
    summary = summarised(load_federated(experiment.data, experiment.partition, seed=experiment.seed))
    drawn = client_data.draw(summary, picture)
    if as_json:
        print(json.dumps({**client_data.as_json(summary), "picture": str(drawn)}, indent=2))
    else:
        client_data.show(Console(), summary)
        print(f"Picture: {drawn}")


def _recipe_and_changes(words: Sequence[str], method: str, seeds: int | None) -> tuple[str, list[str]]:
    recipe, given = _named_and_changes(words, "digits")
    for option, value, keys in (("--method", method, ("method", "methods")), ("--seeds", seeds, ("seeds",))):
        for change in given:
            if value and change.partition("=")[0].strip() in keys:
                raise ConfigError(f"Both {option} and {change} are given; keep one of them.")
    changes = [*given, *([f"methods=[{','.join(_names(method))}]"] if method else [])]
    changes += [f"seeds={seeds}"] if seeds else []
    # The recipe's name is that of its data, and would be false for other data.
    data = _other_data(words, changes)
    if data and not _is_set("name", changes):
        changes.append(f"name={re.sub(r'[^A-Za-z0-9_.-]+', '-', data)[:100]}")
    return recipe, changes


def _other_data(words: Sequence[str], changes: Sequence[str]) -> str:
    """The data that a command without a recipe names; empty for one with a recipe, or without data."""
    from raypfl.experiment.assignments import parse_assignments

    if not words or "=" not in words[0]:
        return ""
    given = {".".join(path): value for path, value in parse_assignments(changes)}
    data = given.get("data.name", given.get("data"))
    name = data.get("name") if isinstance(data, dict) else data
    return name if isinstance(name, str) and name != "digits" else ""


def _rest_of_recipe(planned: Sequence[Experiment]) -> str:
    """What runs of other data take from the recipe `digits`, which their command does not name."""
    from raypfl.data.datasets.population import is_described

    described = [experiment.to_dict() for experiment in planned]
    methods = " and ".join(dict.fromkeys(values["method"]["name"] for values in described))
    first = described[0]
    parts = [f"method {methods}", f"model {first['model']['name']}", f"{first['rounds']} rounds"]
    if not is_described(planned[0].data):
        parts.insert(1, f"partition {first['partition']['name']}")
    return (
        f"No recipe is named, so all that is not set is that of the recipe digits. That makes: {', '.join(parts)}. "
        "Set these as KEY=VALUE, or begin with a YAML file or with another recipe: raypfl list recipes."
    )


def _is_set(key: str, changes: Sequence[str]) -> bool:
    return any(change.partition("=")[0].strip() == key for change in changes)


def _study_and_changes(words: Sequence[str], rounds: int | None, seeds: int | None) -> tuple[str, list[str]]:
    source, changes = _named_and_changes(words, "digits-personal")
    return source, changes + [f"{key}={count}" for key, count in (("rounds", rounds), ("seeds", seeds)) if count]


def _named_and_changes(words: Sequence[str], default: str) -> tuple[str, list[str]]:
    from raypfl.experiment.assignments import last_of_each

    _refuse_options(words)
    first, *rest = words or [default]
    return (default, last_of_each(words)) if "=" in first else (first, last_of_each(rest))


def _refuse_options(words: Sequence[str]) -> None:
    """Settings are no options: say how the setting is written that is given as one."""
    for option in (word.partition("=")[0] for word in words if word.startswith("-")):
        from raypfl.experiment.reference import SETTINGS

        meant = [name for name in SETTINGS if name.rpartition(".")[2] == option.strip("-").replace("-", "_")]
        hint = f"write {' or '.join(f'{name}=VALUE' for name in meant)}."
        fallback = "settings are given as KEY=VALUE, such as rounds=5."
        raise ConfigError(f"There is no option {option}; {hint if meant else fallback}")


def _names(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _options(registry: Registry, name: str) -> str:
    """A line for each option; options that are inherited unchanged from a registered method go under its name."""
    from raypfl.experiment.components import GIVEN_BY_ENGINE, options_of

    entry = registry.get(name)
    known = {key: option.default for key, option in options_of(entry, ("config", "member", *GIVEN_BY_ENGINE)).items()}
    base = next((base for base in getattr(entry, "__mro__", ())[1:] if ":" not in registry.name_of(base)), None)
    inherited = options_of(base) if base else {}
    same = {key for key, option in inherited.items() if key in known and option.default == known[key]}
    lines = [f"{key} = {default!r}" for key, default in known.items() if key not in same]
    return "\n".join([*lines, *([f"and those of {registry.name_of(base)}"] if inherited else [])])


def _show_warning(
    otherwise: Callable[..., None], shown: set[str], text: Warning, category: type[Warning], *where: Any
) -> None:
    from raypfl.results.display.console import warner

    if str(text) in shown:
        return
    shown.add(str(text))
    if issubclass(category, UserWarning):
        console = Console(stderr=True)
        with console.capture() as said:
            warner(console)(str(text))
        sys.stderr.write(said.get())  # which stays above a live table; what a second console prints is drawn over
    else:
        otherwise(text, category, *where)


def _print_error(text: str, colour: str) -> None:
    Console(stderr=True).print(Text(text, colour), soft_wrap=True)
