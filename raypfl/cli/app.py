"""The command ``raypfl``: its subcommands, in the order in which the help shows them."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from raypfl.cli.arguments import ACCEPT_UNKNOWN_OPTIONS
from raypfl.cli.job_commands import jobs, logs, stop, submit
from raypfl.cli.list_commands import list_catalogue, plan, show_data
from raypfl.cli.messages import CommandsWithMessages
from raypfl.cli.result_commands import personalize, predict, report, serve, track
from raypfl.cli.run_commands import new_study, ntk, pretrain, resume, run, study, tune
from raypfl.common.version import __version__

app = typer.Typer(
    cls=CommandsWithMessages,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Personalized federated learning, simulated on Ray.",
)
data_app = typer.Typer(cls=CommandsWithMessages, no_args_is_help=True, help="Look at the data of each client.")

data_app.command("show", context_settings=ACCEPT_UNKNOWN_OPTIONS)(show_data)

EXPERIMENTS = "Experiments"
app.command(context_settings=ACCEPT_UNKNOWN_OPTIONS, rich_help_panel=EXPERIMENTS)(run)
app.command(context_settings=ACCEPT_UNKNOWN_OPTIONS, rich_help_panel=EXPERIMENTS)(resume)
app.command(context_settings=ACCEPT_UNKNOWN_OPTIONS, rich_help_panel=EXPERIMENTS)(study)
app.command("study new", context_settings=ACCEPT_UNKNOWN_OPTIONS, rich_help_panel=EXPERIMENTS)(new_study)
app.command(context_settings=ACCEPT_UNKNOWN_OPTIONS, rich_help_panel=EXPERIMENTS)(tune)
app.command(context_settings=ACCEPT_UNKNOWN_OPTIONS, rich_help_panel=EXPERIMENTS)(pretrain)

BEFORE = "Before an experiment"
app.command("list", rich_help_panel=BEFORE)(list_catalogue)
app.add_typer(data_app, name="data", rich_help_panel=BEFORE)
app.command(context_settings=ACCEPT_UNKNOWN_OPTIONS, rich_help_panel=BEFORE)(plan)

RESULTS = "Results and models"
app.command(rich_help_panel=RESULTS)(report)
app.command(rich_help_panel=RESULTS)(track)
app.command(context_settings=ACCEPT_UNKNOWN_OPTIONS, rich_help_panel=RESULTS)(ntk)
app.command(rich_help_panel=RESULTS)(predict)
app.command(rich_help_panel=RESULTS)(personalize)
app.command(rich_help_panel=RESULTS)(serve)

JOBS = "Jobs on a Ray cluster"
app.command(context_settings=ACCEPT_UNKNOWN_OPTIONS, rich_help_panel=JOBS)(submit)
app.command(rich_help_panel=JOBS)(jobs)
app.command(rich_help_panel=JOBS)(logs)
app.command(rich_help_panel=JOBS)(stop)


def main() -> None:
    """Carry out the command line, and raise SystemExit."""
    # So that `my_module:MyMethod` is found in the working directory, as under `python -m`.
    sys.path.insert(0, os.getcwd())
    app()


def _show_version(is_requested: bool) -> None:
    if is_requested:
        print(f"raypfl {__version__}")
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Options of the command itself."""
