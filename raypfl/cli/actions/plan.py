"""What ``raypfl plan`` does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from raypfl.cli.actions.json_text import json_text
from raypfl.experiment import Experiment
from raypfl.results.display import plan as display
from raypfl.results.display.console import step_printer
from raypfl.results.display.fitting import ProgressConsole
from raypfl.results.drawing.plan import draw
from raypfl.results.labels import labels
from raypfl.runs.planning.plan import plan


def carry_out(
    experiments: Sequence[Experiment], num_clients: int | None, picture: Path, quiet: bool, as_json: bool
) -> None:
    """Plan the runs of a comparison, print the plans, and draw each: one for each method, with its first seed."""
    console = Console()
    print_step = step_printer(ProgressConsole(), quiet)
    by_label: dict[str, Experiment] = {}
    for label, experiment in zip(labels(experiments), experiments, strict=True):
        by_label.setdefault(label, experiment)

    numbers = {}
    for i, (label, experiment) in enumerate(by_label.items(), start=1):
        result = plan(experiment, print_step, num_clients)
        file = picture
        if len(by_label) > 1:
            file = picture.with_stem(f"{picture.stem}-{i}")
        draw(result, file, label)
        numbers[label] = {**display.as_json(result), "picture": str(file)}
        if as_json:
            continue
        if len(by_label) > 1:
            console.print(f"\n[bold]{escape(label)}")
        display.show(console, result)
        print(f"Picture: {file}")

    if as_json and len(numbers) > 1:
        print(json_text(numbers))
    elif as_json:
        print(json_text(*numbers.values()))
