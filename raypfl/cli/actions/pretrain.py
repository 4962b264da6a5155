"""`raypfl pretrain`: train a network on a pool, and print the file of its weights."""

from __future__ import annotations

import json

from rich.console import Console
from rich.text import Text

from raypfl.common.errors import Unwritable
from raypfl.experiment import Experiment
from raypfl.integrations.tracking.connection import first_line, quiet_mlflow
from raypfl.integrations.tracking.pretraining import record_pretraining
from raypfl.results.display.console import step_printer, warner
from raypfl.results.display.fitting import ProgressConsole
from raypfl.runs.choices.pretraining import pretrain


def carry_out(experiment: Experiment, quiet: bool, as_json: bool) -> None:
    """Pretrain the experiment's network, record new training in MLflow, and print the file of weights.

    Raises
    ------
    RaypflError : if the network cannot be trained.
    """
    progress = ProgressConsole()
    console = Console()
    result = pretrain(experiment, step_printer(progress, quiet))
    if result.seconds is not None:
        try:
            record_pretraining(experiment, result)
        except (quiet_mlflow().MlflowException, OSError, Unwritable) as error:
            warner(progress)(f"MLflow did not record it: {first_line(error)}")
    if as_json:
        console.print_json(json.dumps({"weights": str(result.path), "loss": result.loss, "seconds": result.seconds}))
        return
    origin = "made before" if result.seconds is None else f"trained in {result.seconds:.1f} s"
    console.print(
        Text(f"{result.samples:,} samples of {experiment.model.pretrain}, mean loss {result.loss:.3f}, {origin}")
    )
    console.print(Text(f"model.weights={result.path}"), soft_wrap=True)
