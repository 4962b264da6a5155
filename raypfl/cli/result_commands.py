"""The commands that use finished runs: report, track, predict, personalize and serve."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from raypfl.cli.arguments import Baseline, RunFolder
from raypfl.cli.messages import print_message


def report(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="RUN...", help="Folders of runs, comparisons, studies or sweeps, or folders of these."),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(
            help="File to write: an HTML page, the table of results (.tex, .csv), or the picture (.pdf, .svg, .png)."
        ),
    ] = Path("report.html"),
    baseline: Baseline = None,
    named_clients: Annotated[
        bool,
        typer.Option("--named-clients", help="Write the table of clients by name; --out ends in .tex or .csv."),
    ] = False,
) -> None:
    """Write an HTML page about runs: results, curves, clients, data, traffic and settings.

    --out table.tex writes the table of results as LaTeX, --out table.csv as CSV, and --out figure.pdf the picture.
    """
    from raypfl.results.report import find_runs, refuse_file, write
    from raypfl.results.report.parts import without_part
    from raypfl.results.report.searches.folders import has_search

    folders = runs or []
    refuse_file(out, named_clients)
    # With many runs, both reading and drawing take a while.
    print_message("Reading runs", "")
    results, reasons_left_out = find_runs(folders)
    for reason in reasons_left_out:
        print_message(reason, "yellow")
    print_message("Writing the report", "")
    searches = [folder for folder in folders if has_search(folder)]
    path = write(results, out, reasons_left_out, searches, baseline, named_clients)
    for reason in without_part(results):
        print_message(reason, "yellow")
    print(f"Report: {path}")


def track(
    folders: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders of runs or comparisons.", show_default=False)
    ],
    uri: Annotated[str | None, typer.Option(help="MLflow's tracking URI; by default that of each run.")] = None,
) -> None:
    """Record finished runs in MLflow, for example if the tracking server was unreachable during the run."""
    from raypfl.integrations.tracking import listener

    for folder in folders:
        print(f"{folder} is in MLflow: {listener.track(folder, uri)}")


def predict(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|MODEL", help="Folder of a run, or a model's file from personalize.", show_default=False
        ),
    ],
    rows: Annotated[
        Path, typer.Argument(metavar="FILE", help="CSV or Parquet file with the rows.", show_default=False)
    ],
    client: Annotated[
        str | None,
        typer.Option(metavar="NAME|NUMBER", help="Client whose personal model predicts all rows.", show_default=False),
    ] = None,
    use_global: Annotated[bool, typer.Option("--global", help="Predict all rows by the global model.")] = False,
    out: Annotated[Path, typer.Option(metavar="FILE", help="File to write, .csv or .parquet.")] = Path(
        "predictions.csv"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Predict the target of new rows, by the models of a run that was trained on a table.

    By default, each row is predicted by the personal model of the client that its column data.group names or, if the
    method makes no personal models, by the global model. The file written has the rows and their predictions.
    """
    from raypfl.cli.actions import predict as implementation

    implementation.predict(run, rows, client, use_global, out, as_json)


def personalize(
    run: RunFolder,
    data: Annotated[
        Path,
        typer.Option(
            metavar="PATH",
            help="The client's samples: a .npz file with x and y, a table like the run's, or a folder.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="File of the model.")] = Path("model.safetensors"),
    held_out: Annotated[float, typer.Option(help="Share of the samples held out to test the model.", min=0)] = 0.25,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Make a model for a new client from labelled samples, by the run's method, and save it as safetensors.

    A folder contains one folder of images per class, or files like those of the run's data set.
    """
    from raypfl.cli.actions import personalize as implementation

    implementation.personalize(run, data, out, held_out, as_json)


def serve(
    run: RunFolder,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=1, max=65535)] = 8000,
    replicas: Annotated[int, typer.Option(help="Number of processes that make models.", min=1)] = 1,
    max_mb: Annotated[float, typer.Option(help="Largest size of a request in megabytes.", min=0.001)] = 10.0,
    max_samples: Annotated[int, typer.Option(help="Largest number of samples in a request.", min=1)] = 1000,
) -> None:
    """Make models for new clients over HTTP, through Ray Serve (pip install 'raypfl\\[serve]').

    Requests need a token: the value of $RAYPFL_TOKEN, or a new one, which is printed.
    """
    from raypfl.cli.actions import personalize as implementation

    implementation.serve(run, host, port, replicas, max_mb, max_samples)
