"""Runs from Python: with their progress on the screen, and results that print, draw and display themselves."""

from __future__ import annotations

import base64
import contextlib
import io
import sys
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from raypfl.common.errors import ConfigError
from raypfl.config import Experiment
from raypfl.display.console import lines_for, view
from raypfl.display.outcome import table
from raypfl.runs import driver, result
from raypfl.server.events import Listener

if TYPE_CHECKING:
    from PIL.Image import Image


class Result(result.Result):
    __doc__ = result.Result.__doc__

    def plot(self, path: str | Path | None = None) -> Image:
        """Draw the metric over rounds and of each client at the end: an image that notebooks display.

        `path` : of the PNG file; None: ``picture.png`` in the run's folder.

        Raises
        ------
        ConfigError : if the run was never evaluated.
        """
        if not self.evaluations.num_rows:
            raise ConfigError(f"The run in {self.run_dir} is {self.status} and was never evaluated: nothing to plot.")
        from PIL import Image

        from raypfl.results import drawing  # Matplotlib takes a second to import

        file = drawing.draw([self], path or self.run_dir / "picture.png")
        with Image.open(file) as image:
            image.load()
        return image

    def _repr_html_(self) -> str:
        if not self.evaluations.num_rows:
            return f"<p>{escape(repr(self))}</p>"
        console = Console(record=True, file=io.StringIO(), width=120)
        console.print(table([self]))
        text = console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
        png = io.BytesIO()
        self.plot().save(png, format="PNG")
        image = f'<img width="880" src="data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}" />'
        return f"<p>{escape(repr(self))}</p>{text}{image}"


def run(
    experiment: Experiment,
    *,
    listeners: Sequence[Listener] = (),
    run_dir: str | Path | None = None,
    progress: bool | None = None,
) -> Result:
    """Run an experiment.

    Parameters
    ----------
    listeners : called with every event (:mod:`raypfl.server.events`), in order, in this process. One that raises
        :class:`raypfl.common.errors.Stopped` at a `Checkpointed` event stops the run.
    run_dir : a new folder for the run; None: one in ``experiment.output``, named after experiment, method and time.
    progress : whether to show progress on standard error; None: in a terminal and in a notebook.

    Returns
    -------
    Its result; ``result.status`` is ``"stopped"`` if it was asked to stop (Ctrl-C, SIGTERM, SIGHUP).

    Raises
    ------
    KeyboardInterrupt : if it was asked to stop before it started, or twice; :func:`resume` continues.
    RaypflError : if it failed. Completed rounds are in the run's folder, where :func:`resume` continues.
    """
    with _shown(experiment, progress) as shown:
        return _own(driver.run(experiment, listeners=[*shown, *_listed(listeners)], run_dir=run_dir))


def resume(
    run_dir: str | Path,
    *,
    listeners: Sequence[Listener] = (),
    overrides: Sequence[str] = (),
    progress: bool | None = None,
) -> Result:
    """Continue a run that was stopped, failed or was killed, to the same bits as an uninterrupted one.

    Parameters
    ----------
    run_dir : the run's folder.
    overrides : ``dotted.key=value`` changes to the experiment, such as ``rounds=200`` for a longer run.
    listeners, progress : as for :func:`run`.
    """
    with _shown(result.description(run_dir).override(overrides), progress) as shown:
        return _own(driver.resume(run_dir, listeners=[*shown, *_listed(listeners)], overrides=overrides))


@contextlib.contextmanager
def _shown(experiment: Experiment, progress: bool | None) -> Iterator[list[Listener]]:
    """Listeners that show a run while it is active."""
    if progress is None:
        progress = sys.stderr.isatty() or "ipykernel" in sys.modules
    if not progress or not isinstance(experiment, Experiment):  # which is refused with a better sentence
        yield []
        return
    with view(Console(stderr=True), lines_for([experiment])) as shown:
        yield [shown.listener(0)]


def _listed(listeners: Sequence[Listener]) -> Sequence[Listener]:
    if callable(listeners):
        raise ConfigError(f"listeners is {listeners!r}; it must be a list of such: listeners=[...].")
    return listeners


def _own(done: result.Result) -> Result:
    return Result(**vars(done))
