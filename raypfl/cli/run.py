"""What `raypfl run` and `raypfl resume` do: carry out runs one after another, then show the results."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from rich.console import Console

from raypfl.common.errors import CheckpointError, ConfigError, NoRun, RaypflError, Refused, Stopped, Unwritable
from raypfl.common.stopping import interrupting, message_if_killed
from raypfl.engine.events import Listener
from raypfl.experiment import Experiment
from raypfl.experiment.assignments import last_of_each
from raypfl.experiment.identity import harmless_changes
from raypfl.integrations.tracking.connection import how_to_view
from raypfl.integrations.tracking.entries import comparison_description, comparison_metrics, comparison_scores
from raypfl.integrations.tracking.listener import MLflowListener
from raypfl.results.differences import find_label
from raypfl.results.display import outcome
from raypfl.results.display.console import lines_for, view, warner
from raypfl.results.labels import labels
from raypfl.runs import driver as runs
from raypfl.runs.folders import ComparisonFolder, new_folder, with_checkpoints_apart
from raypfl.runs.result import (
    RECIPE,
    RunResult,
    description,
    forget_unbegun,
    is_finished,
    rounds_saved,
    write_description,
)
from raypfl.runs.resuming import continued, ends_later, refuse_another, resumed


@dataclass(frozen=True)
class _Work:
    """One run, or the runs of a comparison.

    Attributes
    ----------
    folder : of the run or of the comparison. runs : the folder of each run, and what is run there.
    tried : recipe or file, and the assignments that changed it. tags : for MLflow.
    changes : assignments that this resume was given, and the next one needs.
    command : of raypfl, which is suggested again. baseline : the method that others are compared with.
    """

    folder: Path
    runs: Mapping[Path, Experiment]
    tried: Sequence[str]
    tags: Mapping[str, str] = field(default_factory=dict)
    changes: Sequence[str] = ()
    command: str = "run"
    baseline: str | None = None

    @classmethod
    def of(cls, comparison: ComparisonFolder, changes: Sequence[str]) -> _Work:
        """The runs of a comparison, with ``dotted.key=value`` changes."""
        folders = [folder.absolute() for folder in comparison.folders]
        runs = dict(zip(folders, comparison.experiments(changes), strict=True))
        words = last_of_each([*comparison.words, *changes])
        return cls(comparison.folder.absolute(), runs, words, {"recipe": comparison.words[0]}, changes)

    @property
    def is_comparison(self) -> bool:
        return len(self.runs) > 1

    @property
    def left(self) -> dict[Path, Experiment]:
        """The runs that are not finished as described."""
        return {
            folder: one
            for folder, one in self.runs.items()
            if not is_finished(folder) or ends_later(one, description(folder))
        }

    @property
    def has_begun(self) -> bool:
        """Whether there is a checkpoint to continue from; an error of the location must not hide that of the run."""
        with suppress(CheckpointError):
            return any(rounds_saved(folder, one) for folder, one in self.runs.items())
        return False

    @property
    def to_continue(self) -> str:
        """The command that continues it, announced as such."""
        return "To continue: " + shlex.join(["raypfl", "resume", str(outcome.nearby(self.folder)), *self.changes])


def run_experiments(
    planned: Sequence[Experiment],
    tried: Sequence[str],
    run_dir: Path | None,
    quiet: bool,
    as_json: bool,
    command: str = "run",
    baseline: str | None = None,
) -> None:
    """Run an experiment, or several as a comparison.

    Parameters
    ----------
    tried : the recipe or file, and the assignments that changed it.
    run_dir : the folder; what has begun there continues, if it is the same. None: a new one in ``output``.
    quiet : show no progress. as_json : print the results for programs. command : of raypfl, which is suggested again.
    baseline : the method that the others are compared with; None: the best one.

    Raises
    ------
    Stopped : if it was interrupted; the text says how to continue.
    RaypflError : if a run is refused, or fails.
    """
    if baseline:
        find_label(labels(planned), baseline)
    tags = {"recipe": tried[0]}
    if run_dir is not None and (begun := _begun(run_dir, planned)):
        _carry_out(replace(begun, tried=tried, tags=tags, command=command, baseline=baseline), quiet, as_json)
        return
    if len(planned) > 1:
        comparison = ComparisonFolder.new(planned, tried, run_dir)
        work, forget = _Work.of(comparison, []), comparison.forget_unbegun
    else:
        folder = (run_dir or new_folder(planned[0])).absolute()
        write_description(folder, planned[0])
        work, forget = _Work(folder, {folder: planned[0]}, tried, tags), partial(forget_unbegun, folder)
    try:
        _carry_out(replace(work, command=command, baseline=baseline), quiet, as_json)
    except Refused:
        forget()
        raise


def _begun(folder: Path, planned: Sequence[Experiment]) -> _Work | None:
    """What is left of these runs in the folder where they were started; None if the folder has no runs yet.

    Raises
    ------
    ConfigError : if it has others.
    """
    comparison = ComparisonFolder.load(folder)
    if comparison is None and not (folder / RECIPE).exists():
        return None
    there = len(comparison.runs) if comparison else 1
    if there != len(planned):
        kinds = [f"a comparison of {count} runs" if count > 1 else "a single run" for count in (there, len(planned))]
        raise ConfigError(f"{folder} has {kinds[0]}, and this command {kinds[1]}. Name another folder.")
    folders = comparison.folders if comparison else [folder]
    asked = with_checkpoints_apart(planned, folder) if comparison else planned
    for one, inside in zip(asked, folders, strict=True):
        refuse_another(inside, one, description(inside))
    changes = harmless_changes(planned[0], description(folders[0]))
    return _work(folder, comparison, changes)


def resume_folder(
    folder: Path, changes: Sequence[str], quiet: bool, as_json: bool, baseline: str | None = None
) -> None:
    """Finish the run or comparison in a folder, with ``dotted.key=value`` changes. Raises as `run_experiments` does."""
    work = _work(folder, ComparisonFolder.load(folder), changes)
    if baseline:
        find_label(labels(list(work.runs.values())), baseline)
    _carry_out(replace(work, baseline=baseline), quiet, as_json)


def continue_as_new(
    folder: Path, round: int, new_folder: Path, changes: Sequence[str], quiet: bool, as_json: bool
) -> None:
    """Continue a run after a round as a new run, with ``dotted.key=value`` changes. Raises as `run_experiments` does.

    The run that is continued stays as it is.
    """
    with continued(folder, round, new_folder, changes) as folder:
        _carry_out(_work(folder, None, []), quiet, as_json)


def _work(folder: Path, comparison: ComparisonFolder | None, changes: Sequence[str]) -> _Work:
    """The run or comparison that is in a folder, with ``dotted.key=value`` changes."""
    if comparison:
        return _Work.of(comparison, changes)
    planned = {folder.absolute(): resumed(folder, changes)}
    return _Work(folder.absolute(), planned, [str(folder / RECIPE)], changes=changes)


def _carry_out(work: _Work, quiet: bool, as_json: bool) -> None:
    """Carry out the runs that are left, then show the results there are, even if a run fails."""
    progress = Console(stderr=True)
    planned, left = list(work.runs.values()), work.left
    lines = lines_for(planned)
    for line, folder in zip(lines, work.runs, strict=True):
        if folder not in left:
            line.status, line.round = "finished", line.rounds
    results: list[RunResult] = []
    name = planned[0].name if work.is_comparison else None
    kept_in = work.folder if work.is_comparison else None
    tracking = MLflowListener(name, tags=work.tags, warn=warner(progress), kept_in=kept_in)
    with interrupting(), message_if_killed(work.to_continue), tracking as tracked:
        trackers = tracked.for_each(planned)
        try:
            with view(progress, lines, quiet) as shown, _session(list(left.values()), shown.listener(0)):
                for i, folder in enumerate(work.runs):
                    if folder in left:
                        listeners: list[Listener] = [shown.listener(i), trackers[i]]
                        results.append(runs.resume(folder, listeners=listeners, overrides=work.changes))
                    else:
                        results.append(RunResult.load(folder))
                    if results[-1].status == "stopped":
                        raise KeyboardInterrupt
            if work.changes and (comparison := ComparisonFolder.load(work.folder)):
                comparison.write(work.tried)
        except KeyboardInterrupt:  # also before the first round, between two runs, or a second one
            raise Stopped(f"Stopped. {_unfinished(work, results)}") from None
        except Refused:
            raise
        except RaypflError as error:
            if not results and not work.has_begun:
                raise
            raise RaypflError(f"{error}\n{_unfinished(work, results)}") from error
        finally:
            if results:
                _report(work, results, tracked, as_json)


@contextmanager
def _session(left: Sequence[Experiment], listener: Listener) -> Iterator[None]:
    """Within: several runs share a session, after a check that would refuse any of them."""
    if len(left) < 2:
        yield
        return
    runs.check(left, listeners=[listener])
    with runs.session(left[0], listeners=[listener]):
        yield


def _unfinished(work: _Work, results: Sequence[RunResult]) -> str:
    """How many runs are finished, and the command that continues."""
    if not work.is_comparison:
        return work.to_continue
    finished = sum(result.status == "finished" for result in results)
    before = sum(result.status == "finished" for result in _not_reached(work, results))
    changed = f" with {shlex.join(work.changes)}; of {before}, there are the earlier results" if before else ""
    return f"{finished} of {len(work.runs)} runs are finished{changed}. {work.to_continue}"


def _not_reached(work: _Work, results: Sequence[RunResult]) -> list[RunResult]:
    """What the runs after those with these results have of an earlier time."""
    found = []
    for folder in [*work.runs][len(results) :]:
        with suppress(NoRun):
            found.append(RunResult.load(folder))
    return [result for result in found if result.status != "failed"]


def _report(work: _Work, results: Sequence[RunResult], tracked: MLflowListener, as_json: bool) -> None:
    is_complete = len(results) == len(work.runs) and results[-1].status == "finished"
    results = [*results, *_not_reached(work, results)]
    judged = [result for result in results if result.evaluations.num_rows]
    pictures = _pictures(work.folder, results, judged, warner(Console(stderr=True)))
    for drawn in pictures.values():
        tracked.attach(drawn)
    baseline = _baseline(work, judged)
    if judged:  # also runs that were finished before a comparison was interrupted
        tracked.describe(
            comparison_description(judged, baseline), comparison_metrics(judged, baseline), comparison_scores(judged)
        )
    if as_json:
        print(json.dumps(outcome.as_json(results, pictures, baseline), indent=2))
    else:
        mlflow = how_to_view(results[0].experiment, tracked.experiment_id)
        tried = work.tried if is_complete else ()
        outcome.show(Console(), results, pictures, tried, work.folder, mlflow, work.command, baseline)


def _baseline(work: _Work, judged: Sequence[RunResult]) -> str | None:
    """The label of the baseline; None before it has run: methods are then compared with the best."""
    if work.baseline is None:
        return None
    with suppress(ConfigError):
        return find_label(labels([result.experiment for result in judged]), work.baseline)
    return None


def _pictures(
    folder: Path, results: Sequence[RunResult], judged: Sequence[RunResult], warn: Callable[[str], None]
) -> dict[str, Path]:
    """The pictures that were drawn, by their headings."""
    # Matplotlib takes a second, which an error need not wait for.
    from raypfl.results import drawing, latent_picture, logged_picture
    from raypfl.trained import descriptor_picture

    pictures = {}
    try:
        if judged:
            pictures["Picture"] = drawing.draw(judged, folder / "picture.png")
        if latent_picture.shown(results):
            pictures["Latent space"] = latent_picture.draw(results, folder / "picture-latent.png")
        if logged_picture.shown(results):
            pictures["Logged images"] = logged_picture.draw(results, folder / "picture-images.png")
        if descriptor_picture.shown(results):
            pictures["Descriptors"] = descriptor_picture.draw(results, folder / "picture-descriptors.png")
    except Unwritable as problem:
        warn(str(problem))
    return pictures
