"""What `raypfl pretrain` does: trains a network on a pool, and says where its weights are."""

from __future__ import annotations

import json

from rich.console import Console
from rich.text import Text

from raypfl.engine.events import Event, Progress
from raypfl.experiment import Experiment
from raypfl.integrations.tracking.connection import first_line, quiet_mlflow
from raypfl.integrations.tracking.pretraining import record_pretraining
from raypfl.results.display.console import warner
from raypfl.runs.pretraining import pretrain


def carry_out(experiment: Experiment, quiet: bool, as_json: bool) -> None:
    """Pretrain the experiment's network, record that in MLflow if it is new, and print the file of weights.

    Raises
    ------
    RaypflError : if it cannot be trained.
    """
    progress, console = Console(stderr=True), Console()

    def hear(event: Event) -> None:
        if isinstance(event, Progress) and not quiet:
            progress.print(Text(event.text, "dim"))

    done = pretrain(experiment, hear)
    if done.seconds is not None:
        try:
            record_pretraining(experiment, done)
        except (quiet_mlflow().MlflowException, OSError) as error:
            warner(progress)(f"MLflow did not record it: {first_line(error)}")
    if as_json:
        console.print_json(json.dumps({"weights": str(done.path), "loss": done.loss, "seconds": done.seconds}))
        return
    how = "was there already" if done.seconds is None else f"trained in {done.seconds:.1f} s"
    console.print(Text(f"{done.samples:,} samples of {experiment.model.pretrain}, mean loss {done.loss:.3f}, {how}"))
    console.print(Text(f"model.weights={done.path}"), soft_wrap=True)
