"""What `raypfl run` and `raypfl resume` do: run after run, and then tell what came of them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rich.console import Console

from raypfl import runs
from raypfl.common.errors import ConfigError, RaypflError, Stopped, Unwritable
from raypfl.common.last_words import last_words
from raypfl.common.stopping import interrupting
from raypfl.config import Experiment
from raypfl.results import outcome
from raypfl.results.console import view, warner
from raypfl.results.progress import RunLine, lines_for
from raypfl.runs import Result
from raypfl.runs.folders import Comparison, new_folder
from raypfl.runs.result import RECIPE, description, is_finished
from raypfl.server.events import Listener
from raypfl.tracking.entries import comparison_of
from raypfl.tracking.listener import MLflowListener

Session = Callable[[Sequence[Listener]], AbstractContextManager[None]]


@dataclass(frozen=True)
class Shown:
    """How a person wants to be told: `quiet`, without progress; `as_json`, for programs."""

    quiet: bool
    as_json: bool


@dataclass(frozen=True)
class _Work:
    """One run, or those of a comparison.

    Attributes
    ----------
    folder : of the run or of the comparison. planned, lines, jobs : one a run, in order.
    tried : recipe or file, and the assignments that changed it. tags : for MLflow.
    changes : with which this is to go on if it is cut off.
    session : within which the jobs go.
    """

    folder: Path
    planned: Sequence[Experiment]
    lines: Sequence[RunLine]
    jobs: Sequence[Callable[..., Result]]
    tried: Sequence[str]
    tags: Mapping[str, str] = field(default_factory=dict)
    changes: Sequence[str] = ()
    session: Session = lambda listeners: nullcontext()

    @property
    def is_comparison(self) -> bool:
        return len(self.jobs) > 1

    def how_to_go_on(self, results: Sequence[Result]) -> str:
        """How far it came, and the command."""
        finished = sum(result.status == "finished" for result in results)
        count = f"{finished} of {len(self.jobs)} runs are finished. " if self.is_comparison else ""
        return f"{count}{self.command}"

    @property
    def command(self) -> str:
        """To go on with."""
        return "To go on: " + shlex.join(["raypfl", "resume", str(outcome.nearby(self.folder)), *self.changes])


def begin(planned: Sequence[Experiment], tried: Sequence[str], shown: Shown) -> None:
    """Run an experiment, or several as a comparison.

    Parameters
    ----------
    tried : the recipe or file that was named, and the assignments that changed it.

    Raises
    ------
    Stopped : if it was interrupted; the text says how to go on.
    RaypflError : if a run is refused, or fails.
    """
    if len(planned) > 1:
        comparison = Comparison.new(planned, tried)
        try:
            _carry_out(_compared(comparison, []), shown)
        except ConfigError:
            comparison.forget_unbegun()
            raise
        return
    folder = new_folder(planned[0]).absolute()
    job = partial(runs.run, planned[0], run_dir=folder)
    _carry_out(_Work(folder, planned, lines_for(planned), [job], tried, {"recipe": tried[0]}), shown)


def go_on(folder: Path, changes: Sequence[str], shown: Shown) -> None:
    """Bring the run or the comparison in a folder to its end, with ``dotted.key=value`` changes.

    Raises
    ------
    Stopped, RaypflError : as for `begin`.
    """
    if comparison := Comparison.load(folder):
        _carry_out(_compared(comparison, changes), shown)
        return
    planned = [description(folder).override(changes)]
    job = partial(runs.resume, folder, overrides=changes)
    _carry_out(
        _Work(folder.absolute(), planned, lines_for(planned), [job], [str(folder / RECIPE)], changes=changes), shown
    )


def _compared(comparison: Comparison, changes: Sequence[str]) -> _Work:
    """What is left of a comparison; runs that are finished as they are to be are looked up."""
    planned = comparison.experiments(changes)
    lines = lines_for(planned)
    jobs: list[Callable[..., Result]] = []
    left = []
    for folder, experiment, line in zip(comparison.folders, planned, lines, strict=True):
        if is_finished(folder) and description(folder) == experiment:
            line.status, line.round = "finished", line.rounds
            jobs.append(_known(folder))
        else:
            jobs.append(partial(runs.resume, folder, overrides=changes))
            left.append(experiment)
    tags = {"recipe": comparison.words[0]}
    session = partial(_together, left) if left else _Work.session
    return _Work(comparison.folder.absolute(), planned, lines, jobs, comparison.words, tags, changes, session)


def _known(folder: Path) -> Callable[..., Result]:
    return lambda listeners: Result.load(folder.absolute())


@contextmanager
def _together(planned: Sequence[Experiment], listeners: Sequence[Listener]) -> Iterator[None]:
    """The session of several runs, once none of them is known to be refused."""
    runs.check(planned, listeners=listeners)
    with runs.session(planned[0], listeners=listeners):
        yield


def _carry_out(work: _Work, shown: Shown) -> None:
    """Run after run, then tell what came of those that came to an end, even if a later one fails."""
    progress = Console(stderr=True)
    results: list[Result] = []
    name, kept_in = (work.tried[0], work.folder) if work.is_comparison else (None, None)
    tracking = MLflowListener(name, tags=work.tags, warn=warner(progress), kept_in=kept_in)
    with interrupting(), last_words(work.command), tracking as tracked:
        try:
            with view(progress, work.lines, shown.quiet) as lines, work.session([lines.listener(0)]):
                for i, (job, mine) in enumerate(zip(work.jobs, tracked.for_each(work.planned), strict=True)):
                    results.append(job(listeners=[lines.listener(i), mine]))
                    if results[-1].status == "stopped":
                        raise KeyboardInterrupt
        except KeyboardInterrupt:  # also before a first round, between two runs, or for the second time
            raise Stopped(f"Stopped. {work.how_to_go_on(results)}") from None
        except ConfigError:
            raise
        except RaypflError as error:
            raise RaypflError(f"{error}\n{work.how_to_go_on(results)}") from error
        finally:
            if results:
                _report(work, results, tracked, shown.as_json)


def _report(work: _Work, results: Sequence[Result], tracked: MLflowListener, as_json: bool) -> None:
    judged = [result for result in results if result.evaluations.num_rows]
    pictures = _pictures(work.folder, results, judged, warner(Console(stderr=True)))
    for drawn in pictures.values():
        tracked.attach(drawn)
    if judged:  # also those that were finished before a comparison was cut off
        tracked.describe(comparison_of(judged))
    if as_json:
        print(json.dumps(outcome.as_json(results, pictures), indent=2))
    else:
        outcome.show(Console(), results, pictures, work.tried, work.folder)


def _pictures(
    folder: Path, results: Sequence[Result], judged: Sequence[Result], warn: Callable[[str], None]
) -> dict[str, Path]:
    """What was drawn, by its heading."""
    from raypfl.results import latent_picture, picture  # with Matplotlib: a mistake is told without it

    pictures = {}
    try:
        if judged:
            pictures["Picture"] = picture.draw(judged, folder / "picture.png")
        if latent_picture.shown(results):
            pictures["Latent space"] = latent_picture.draw(results, folder / "picture-latent.png")
    except Unwritable as problem:
        warn(str(problem))
    return pictures
