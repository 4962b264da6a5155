"""`raypfl run` and `raypfl resume`: carry out runs, then show the results."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from raypfl.cli.actions.json_text import json_text
from raypfl.cli.actions.work import Work, raise_for
from raypfl.cli.arguments import as_typed
from raypfl.cli.messages import printing
from raypfl.common.errors import ConfigError, NoRun, RaypflError, Refused, Stopped, Unwritable
from raypfl.common.stopping import message_if_killed, signals_interrupt
from raypfl.engine.events import Listener
from raypfl.experiment import Experiment
from raypfl.experiment.identity import harmless_changes
from raypfl.integrations.tracking.connection import how_to_view
from raypfl.integrations.tracking.entries import comparison_description, comparison_metrics, comparison_scores
from raypfl.integrations.tracking.listener import MLflowListener
from raypfl.integrations.tracking.run_ids import has_run_id
from raypfl.results.display import outcome
from raypfl.results.display.console import view, warner
from raypfl.results.display.fitting import ProgressConsole, output
from raypfl.results.display.run_line import lines_for
from raypfl.results.labels import labels
from raypfl.results.pairing.differences import find_baseline, find_label
from raypfl.results.run_groups import compared
from raypfl.runs import driver
from raypfl.runs.folders import ComparisonFolder, new_folder, with_checkpoints_apart
from raypfl.runs.records import DESCRIPTION, description, discard_unstarted, write_description
from raypfl.runs.result import RunResult
from raypfl.runs.resuming import continued, is_complete_as, notice_of_edited_code, refuse_other_run, resumed
from raypfl.runs.several.resume import resume_all
from raypfl.runs.several.worker import RunOutcome


def run_experiments(
    planned: Sequence[Experiment],
    words: Sequence[str],
    run_dir: Path | None,
    quiet: bool,
    as_json: bool,
    command: str = "run",
    baseline: str | None = None,
) -> None:
    """Run an experiment, or several as a comparison.

    Parameters
    ----------
    words : the recipe or file, and the assignments that changed it.
    run_dir : folder, in which the same run or comparison continues if it was started; None: a new folder in ``output``.
    quiet : show no progress.
    as_json : print the results as JSON.
    command : name of the command, which is suggested again.
    baseline : method that the others are compared with; None: the best one.

    Raises
    ------
    Stopped : on an interruption; the message says how to continue.
    RaypflError : if a run is refused or fails.
    """
    if baseline:
        find_label(labels(planned), baseline)
    tags = {"recipe": words[0]}

    started = None if run_dir is None else _started(run_dir, planned)
    if started:
        _carry_out(replace(started, words=words, tags=tags, command=command, baseline=baseline), quiet, as_json)
        return

    if len(planned) > 1:
        comparison = ComparisonFolder.new(planned, words, run_dir)
        make_work = partial(Work.of, comparison, [])
        forget = comparison.discard_unstarted
    else:
        folder = (run_dir or new_folder(planned[0])).absolute()
        write_description(folder, planned[0])
        make_work = partial(Work, folder, {folder: planned[0]}, words, tags)
        forget = partial(discard_unstarted, folder)

    try:
        # Looks for checkpoints, in a location that may be none.
        work = make_work()
        _carry_out(replace(work, command=command, baseline=baseline), quiet, as_json)
    except Refused:
        forget()
        raise


def _started(folder: Path, planned: Sequence[Experiment]) -> Work | None:
    """Return the work to continue in a folder where these runs were started; None if the folder has no runs yet.

    Raises
    ------
    ConfigError : if the folder has other runs.
    """
    comparison = ComparisonFolder.load(folder)
    if comparison is None and not (folder / DESCRIPTION).exists():
        return None

    count = len(comparison.runs) if comparison else 1
    if count != len(planned):
        problem = f"{folder} has {_counted(count)}, and this command {_counted(len(planned))}."
        raise ConfigError(f"{problem} Name another folder.")

    run_folders = comparison.folders if comparison else [folder]
    requested = with_checkpoints_apart(planned, folder) if comparison else planned
    for experiment, run_folder in zip(requested, run_folders, strict=True):
        refuse_other_run(run_folder, experiment, description(run_folder), folder)
    changes = harmless_changes(planned[0], description(run_folders[0]))
    return _work(folder, comparison, changes)


def _counted(runs: int) -> str:
    return f"a comparison of {runs} runs" if runs > 1 else "a single run"


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

    The old run stays unchanged.
    """
    with continued(folder, round, new_folder, changes) as folder:
        _carry_out(_work(folder, None, []), quiet, as_json)


def _work(folder: Path, comparison: ComparisonFolder | None, changes: Sequence[str]) -> Work:
    """Return the run or comparison in a folder, with ``dotted.key=value`` changes."""
    if comparison:
        return Work.of(comparison, changes)
    planned = {folder.absolute(): resumed(folder, changes)}
    return Work(folder.absolute(), planned, [str(folder / DESCRIPTION)], changes=changes)


def _carry_out(work: Work, quiet: bool, as_json: bool) -> None:
    """Carry out the runs that are neither finished nor diverged, then show all results, even if a run fails."""
    progress = ProgressConsole()
    planned = list(work.runs.values())
    diverged = work.diverged
    to_do = {folder: run for folder, run in work.unfinished.items() if folder not in diverged}

    lines = lines_for(planned)
    for line, folder in zip(lines, work.runs, strict=True):
        if folder in diverged:
            line.status = "diverged"
        elif folder not in to_do:
            line.status = "finished"
            line.round = line.rounds

    for folder, run in work.runs.items():
        notice = "" if folder in to_do else notice_of_edited_code(folder, run)
        if notice:
            warner(progress)(notice)

    name = planned[0].name if work.is_comparison else None
    kept_in = work.folder if work.is_comparison else None
    tracking = MLflowListener(name, tags=work.tags, warn=warner(progress), kept_in=kept_in)

    outcomes: dict[Path, RunOutcome] = {}
    error_of_all: RaypflError | None = None
    with signals_interrupt(), message_if_killed(work.to_continue), tracking as tracked:
        trackers = tracked.for_each(planned)
        try:
            with view(progress, lines, quiet) as shown, _session(list(to_do.values()), shown.listener(0)):
                listeners: dict[Path, list[Listener]] = {}
                for i, folder in enumerate(work.runs):
                    listeners[folder] = [shown.listener(i), trackers[i]]
                for ended in resume_all(to_do, listeners, work.changes):
                    outcomes |= ended
        except KeyboardInterrupt:
            # A second Ctrl-C, or one before the first round or between two runs.
            error_of_all = Stopped("Stopped.")
        except RaypflError as error:
            error_of_all = error

        errors = diverged | {folder: outcome.error for folder, outcome in outcomes.items() if outcome.error}
        results: list[RunResult] = []
        if outcomes or not to_do:
            # The others have the changes, and seeds of one method must have the same settings.
            for folder in diverged if work.changes else ():
                write_description(folder, work.runs[folder])
            results = _results(work)
        if results and (work.is_comparison or not errors):
            _report(work, results, tracked, as_json)
        if work.unfinished.keys() <= work.diverged.keys():
            _note_changes(work)
        raise_for(work, results, outcomes, errors, error_of_all)


def _results(work: Work) -> list[RunResult]:
    """Return the results of the runs that have ended, now or before."""
    results = []
    for folder, experiment in work.runs.items():
        try:
            results.append(RunResult.load(folder))
        except NoRun:
            # A finished one is damaged.
            if is_complete_as(folder, experiment):
                raise
    return results


def _note_changes(work: Work) -> None:
    """Let a comparison's folder say which changes its runs were resumed with, now that all have them."""
    comparison = ComparisonFolder.load(work.folder) if work.changes else None
    if comparison:
        comparison.write(work.words)


@contextmanager
def _session(experiments: Sequence[Experiment], listener: Listener) -> Iterator[None]:
    """Share a session between several runs, once all of them have been checked."""
    if len(experiments) < 2:
        yield
        return
    driver.check(experiments, listeners=[listener])
    with driver.session(experiments[0], listeners=[listener]):
        yield


def _report(work: Work, results: Sequence[RunResult], tracked: MLflowListener, as_json: bool) -> None:
    """Draw, track and print the results, with those of runs that were finished before."""
    is_complete = not work.unfinished
    evaluated = compared(results)

    pictures = _pictures(work.folder, results, evaluated, warner(ProgressConsole()))
    for picture in pictures.values():
        tracked.attach(picture)

    baseline = _baseline(work, evaluated)
    if evaluated:
        tracked.describe(
            comparison_description(evaluated, baseline),
            comparison_metrics(evaluated, baseline),
            comparison_scores(evaluated),
        )
    with printing(shlex.join(["raypfl", "resume", str(outcome.nearby(work.folder))])):
        if as_json:
            print(json_text(outcome.as_json(results, pictures, baseline)))
            return
        mlflow = how_to_view(results[0].experiment, tracked.experiment_id)
        if mlflow and not any(map(has_run_id, work.runs)):
            track = shlex.join(["raypfl", "track", str(outcome.nearby(work.folder))])
            mlflow = f"nothing is recorded; to try again: {track}"
        words = as_typed(work.words) if is_complete else ()
        outcome.show(output(), results, pictures, words, work.folder, mlflow, work.command, baseline)


def _baseline(work: Work, evaluated: Sequence[RunResult]) -> str | None:
    """Return the label of the baseline; None while it has no result, since methods are then compared with the best."""
    if work.baseline is None:
        return None
    with suppress(ConfigError):
        return find_baseline(evaluated, work.baseline)
    return None


def _pictures(
    folder: Path, results: Sequence[RunResult], evaluated: Sequence[RunResult], warn: Callable[[str], None]
) -> dict[str, Path]:
    """Draw the pictures of the results, and return them by heading."""
    # Matplotlib takes a second, which an error need not wait for.
    from raypfl.results import drawing
    from raypfl.results.drawing import latent_picture, logged_picture
    from raypfl.trained import descriptor_picture

    pictures = {}
    try:
        if evaluated:
            pictures["Picture"] = drawing.draw(evaluated, folder / "picture.png")
        if latent_picture.groups_to_draw(results):
            pictures["Latent space"] = latent_picture.draw(results, folder / "picture-latent.png")
        if logged_picture.strips_to_draw(results):
            pictures["Logged images"] = logged_picture.draw(results, folder / "picture-images.png")
        if descriptor_picture.groups_to_draw(results):
            pictures["Descriptors"] = descriptor_picture.draw(results, folder / "picture-descriptors.png")
    except Unwritable as problem:
        warn(str(problem))
    return pictures
