"""What ``raypfl plan`` does."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from raypfl.engine.events import Event, Progress
from raypfl.experiment import Experiment
from raypfl.results.display import plan as display
from raypfl.results.drawing.plan import draw
from raypfl.runs.planning import plan


def carry_out(experiment: Experiment, num_clients: int | None, picture: Path, quiet: bool, as_json: bool) -> None:
    """Plan a run, print the plan, and draw it."""
    console = Console()
    progress = Console(stderr=True)

    def emit(event: Event) -> None:
        if isinstance(event, Progress) and not quiet:
            progress.print(event.text, style="dim")

    result = plan(experiment, emit, num_clients)
    file = draw(result, picture)
    if as_json:
        print(json.dumps({**display.as_json(result), "picture": str(file)}, indent=2))
    else:
        display.show(console, result)
        print(f"Picture: {file}")
