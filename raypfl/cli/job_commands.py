"""The commands for jobs on a Ray cluster: submit, jobs, logs and stop."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from raypfl.cli.arguments import labels, recipe_and_changes, refuse_options, study_and_changes

Kind = Literal["run", "tune", "study"]
"""The commands that can be submitted as a job."""

Address = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Address of the cluster's dashboard, http://HEAD:8265; by default $RAY_ADDRESS.",
        show_default=False,
    ),
]
JobId = Annotated[str, typer.Argument(metavar="ID", help="ID of the job, as in raypfl jobs.", show_default=False)]


def submit(
    context: typer.Context,
    kind: Annotated[
        Kind, typer.Argument(metavar="run|tune|study", help="Command to run as a job.", show_default=False)
    ],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="WORDS", help="Arguments and options, as for raypfl run, tune or study.", show_default=False
        ),
    ] = None,
    address: Address = None,
    detach: Annotated[bool, typer.Option("--detach", help="Return as soon as the job is submitted.")] = False,
) -> None:
    """Submit a run, sweep or study as a job to a Ray cluster, follow it, and return its exit code.

    The job takes along the YAML file and your own modules. Set output=/FOLDER to a folder that outlives the job.
    Submitted again with the same --run-dir (for a study or sweep: the same output), the job continues.
    """
    from raypfl.cli.actions import jobs
    from raypfl.integrations.jobs.description import Description

    words = words or []
    # The job parses these words again, on the cluster; here they are checked and tell which files to take along.
    root: Any = context.find_root().command
    parameters = root.commands[kind].make_context(kind, list(words)).params

    if kind == "run":
        recipe, changes = recipe_and_changes(parameters["words"] or [], parameters["method"], parameters["seeds"])
        description = Description.of_run(recipe, changes)
    elif kind == "study":
        numbers = (parameters[name] for name in ("rounds", "seeds", "trials"))
        source, changes = study_and_changes(parameters["words"] or [], *numbers)
        description = Description.of_study(source, labels(parameters["only"]), changes)
    else:
        source = parameters["source"]
        changes = parameters["changes"] or []
        refuse_options([source, *changes], is_sweep=True)
        description = Description.of_sweep(source, changes)

    exit_code = jobs.submit(kind, words, description, parameters.get("run_dir"), address, detach)
    raise typer.Exit(exit_code)


def jobs(
    address: Address = None, as_json: Annotated[bool, typer.Option("--json", help="Print the jobs as JSON.")] = False
) -> None:
    """List the jobs of a Ray cluster, newest first."""
    from raypfl.cli.actions import jobs as implementation

    implementation.jobs(address, as_json)


def logs(
    job: JobId,
    address: Address = None,
    follow: Annotated[bool, typer.Option(help="Keep printing until the job ends.")] = False,
) -> None:
    """Print a job's log. With --follow, the exit code is that of the job."""
    from raypfl.cli.actions import jobs as implementation

    raise typer.Exit(implementation.logs(job, address, follow))


def stop(job: JobId, address: Address = None) -> None:
    """Stop a job. Its finished rounds are saved; submitted again with the same folder, it continues."""
    from raypfl.cli.actions import jobs as implementation

    implementation.stop(job, address)
