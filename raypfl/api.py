"""The Python interface: runs with their progress on the screen, results that display themselves, and models."""

from __future__ import annotations

import base64
import contextlib
import io
import sys
from collections.abc import Iterator, Sequence
from html import escape
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from raypfl.common.errors import CheckpointError, ConfigError
from raypfl.engine.events import Listener
from raypfl.experiment import Experiment
from raypfl.experiment.parts import as_assignments
from raypfl.integrations.tracking.connection import (
    first_line,
    opening_database,
    quiet_mlflow,
    tracking_uri,
    without_password,
)
from raypfl.integrations.tracking.models import FOLDER
from raypfl.results.display.compare import Differences, compare
from raypfl.results.display.console import view
from raypfl.results.display.fitting import ProgressConsole
from raypfl.results.display.outcome import table
from raypfl.results.display.run_line import RunLine, lines_for
from raypfl.runs import driver, result, resuming
from raypfl.trained.models import TrainedModels

if TYPE_CHECKING:
    from PIL.Image import Image


class Result(result.RunResult):
    __doc__ = result.RunResult.__doc__

    def plot(self, path: str | Path | None = None) -> Image:
        """Draw the metric over rounds and of each client at the end: an image that notebooks display.

        `path` : the PNG file to write; None: ``picture.png`` in the run's folder.

        Raises
        ------
        ConfigError : if the run was never evaluated.
        """
        if not self.evaluations.num_rows:
            raise ConfigError(f"The run in {self.run_dir} is {self.status} and was never evaluated: nothing to plot.")

        from PIL import Image

        # Imported only now, since Matplotlib takes a second to import.
        from raypfl.results import drawing

        file = drawing.draw([self], path or self.run_dir / "picture.png")
        with Image.open(file) as image:
            image.load()
        return image

    def compare(self, *others: result.RunResult, baseline: str | None = None) -> Differences:
        """Compare this run with others, client by client; see :func:`raypfl.compare`."""
        return compare([self, *others], baseline)

    def _repr_html_(self) -> str:
        if not self.evaluations.num_rows:
            return f"<p>{escape(repr(self))}</p>"

        console = Console(record=True, file=io.StringIO(), width=120)
        console.print(table([self]))
        html_table = console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")

        png = io.BytesIO()
        self.plot().save(png, format="PNG")
        encoded = base64.b64encode(png.getvalue()).decode()
        image = f'<img width="880" src="data:image/png;base64,{encoded}" />'
        return f"<p>{escape(repr(self))}</p>{html_table}{image}"


def run(
    experiment: Experiment,
    *,
    listeners: Sequence[Listener] = (),
    run_dir: str | Path | None = None,
    progress: bool | None = None,
    **settings: Any,
) -> Result:
    """Run an experiment.

    Parameters
    ----------
    experiment : the description of the run.
    listeners : functions that are called with every event (:mod:`raypfl.engine.events`), in order, in this process. One
        that raises :class:`raypfl.common.errors.Stopped` at a `Checkpointed` event stops the run.
    run_dir : a new folder for the run; None: one in ``experiment.output``, named after experiment, method and time.
    progress : whether to show progress on standard error; None: in a terminal and in a notebook. Warnings are always
        shown.
    settings : none; an experiment has them, and ``experiment.override(rounds=2)`` changes them.

    Returns
    -------
    the run's result; ``result.status`` is ``"stopped"`` if it was asked to stop (Ctrl-C, SIGTERM, SIGHUP).

    Raises
    ------
    KeyboardInterrupt : if it was asked to stop before it started, or twice; :func:`resume` continues.
    Diverged : if a training's loss or model was not finite, or its loss above ``failures.loss_limit``.
    RaypflError : if it failed. Completed rounds are in the run's folder, where :func:`resume` continues.
    """
    if settings:
        raise ConfigError(
            "raypfl.run takes no settings; change them in the experiment: "
            f"raypfl.run(experiment.override({as_assignments(settings)}))."
        )
    _refuse_single_function(listeners)
    with _display(experiment, progress) as display:
        return _displayable(driver.run(experiment, listeners=[display, *listeners], run_dir=run_dir))


def resume(
    run_dir: str | PathLike[str],
    *,
    listeners: Sequence[Listener] = (),
    overrides: Sequence[str] = (),
    from_round: int | None = None,
    new_run_dir: str | Path | None = None,
    progress: bool | None = None,
    **settings: Any,
) -> Result:
    """Continue a run that was stopped, failed or was killed, to the same bits as an uninterrupted one.

    With `from_round` and `new_run_dir`, a new run continues it with changed settings, and the run stays as it is.

    Parameters
    ----------
    run_dir : the run's folder, or its result.
    overrides : ``dotted.key=value`` changes to the experiment, such as ``rounds=200`` for a longer run. What decides
        the result of a run stays (see :data:`raypfl.runs.resuming.MAY_CHANGE`), unless a new run continues it.
    settings : changes by keyword: ``rounds=200`` is ``overrides=["rounds=200"]``.
    from_round : the round after which a new run continues; there must be a checkpoint of it.
    new_run_dir : the folder of the new run. Its metadata and its history name the run that it continues.
    listeners, progress : as for :func:`run`.

    Raises
    ------
    ConfigError : if a change would falsify what the run has recorded; nothing is written.
    CheckpointError : if there is no checkpoint of `from_round`.
    """
    if (from_round is None) != (new_run_dir is None):
        raise ConfigError(
            "raypfl.resume takes from_round and new_run_dir together: the round after which a new run continues, and "
            "its folder."
        )
    run_dir = Path(run_dir)
    if settings:
        overrides = [*overrides, *as_assignments(settings)]
    if from_round is not None and new_run_dir is not None:
        with resuming.continued(run_dir, from_round, new_run_dir, overrides) as folder:
            return resume(folder, listeners=listeners, progress=progress)

    _refuse_single_function(listeners)
    with _display(resuming.resumed(run_dir, overrides), progress) as display:
        return _displayable(driver.resume(run_dir, listeners=[display, *listeners], overrides=overrides))


def trained_models(run: str | PathLike[str], uri: str | None = None) -> TrainedModels:
    """Return the models that a run ended with, as networks that take images as they are stored.

    Parameters
    ----------
    run : the run's folder, its result, or the id of its MLflow run. The latter needs no folder, and no data either
        unless the method fine-tunes its models.
    uri : MLflow's tracking URI; None: $MLFLOW_TRACKING_URI or, without it, the database in the folder ``runs``.

    Raises
    ------
    CheckpointError : if there is no such run, or it has no models.

    Examples
    --------
    ``raypfl.trained_models(result).personal_model(17)(images)`` gives client 17's logits.
    """
    run = fspath(run)
    if Path(run).is_dir():
        return TrainedModels.of_run(run)

    uri = uri or tracking_uri(Experiment())
    try:
        with opening_database(uri):
            client = quiet_mlflow().MlflowClient(uri)
        return TrainedModels.of_export(client.download_artifacts(run, FOLDER))
    except CheckpointError:
        raise
    # Tracking servers, databases and networks raise errors of all kinds.
    except Exception as error:
        raise CheckpointError(
            f"{run} is neither a run's folder, nor has MLflow at {without_password(uri)} the personal models "
            f"of a run of that id: {first_line(error)}"
        ) from error


@contextlib.contextmanager
def _display(experiment: Experiment, progress: bool | None) -> Iterator[Listener]:
    """While active, yield a listener that shows a run: its progress, or its warnings alone."""
    if progress is None:
        progress = sys.stderr.isatty() or "ipykernel" in sys.modules
    # The driver has a better error message for what is not an Experiment.
    lines = lines_for([experiment]) if isinstance(experiment, Experiment) else [RunLine("")]
    with view(ProgressConsole(), lines, quiet=not progress) as progress_view:
        yield progress_view.listener(0)


def _refuse_single_function(listeners: Sequence[Listener]) -> None:
    """Raise a ConfigError if listeners are a single function, not a list."""
    if callable(listeners):
        raise ConfigError(f"listeners is {listeners!r}; it must be a list of functions: listeners=[...].")


def _displayable(run_result: result.RunResult) -> Result:
    """Return the same result as one that notebooks display."""
    return Result(**vars(run_result))
