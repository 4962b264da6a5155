"""The runs that a command carries out, and what it says at its end: which failed, and how to go on."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from raypfl.common.counting import numbered
from raypfl.common.errors import CheckpointError, Diverged, RaypflError, Refused, Stopped, listed
from raypfl.experiment import Experiment
from raypfl.experiment.assignments import last_of_each
from raypfl.learning.objectives.regression import STANDARDISE
from raypfl.results.display.outcome import nearby
from raypfl.results.labels import labels
from raypfl.runs.folders import ComparisonFolder
from raypfl.runs.records import DESCRIPTION, divergence, ended_at_once, has_failed, is_finished, rounds_saved
from raypfl.runs.result import RunResult
from raypfl.runs.resuming import command_with_changes, is_complete_as
from raypfl.runs.several.worker import STOPPED, RunOutcome
from raypfl.storage.lease import AlreadyRunning

_MOST_FOLDERS = 3


@dataclass(frozen=True)
class Work:
    """One run, or the runs of a comparison.

    Attributes
    ----------
    folder : folder of the run or of the comparison.
    runs : folder -> experiment of each run.
    words : the recipe or file, and the assignments that changed it.
    tags : tags of the runs in MLflow.
    changes : assignments of this resume, which the next one needs too.
    command : name of the command, which is suggested again.
    baseline : method that the others are compared with.
    """

    folder: Path
    runs: Mapping[Path, Experiment]
    words: Sequence[str]
    tags: Mapping[str, str] = field(default_factory=dict)
    changes: Sequence[str] = ()
    command: str = "run"
    baseline: str | None = None

    @classmethod
    def of(cls, comparison: ComparisonFolder, changes: Sequence[str]) -> Work:
        """Return the runs of a comparison, with ``dotted.key=value`` changes."""
        folders = [folder.absolute() for folder in comparison.folders]
        runs = dict(zip(folders, comparison.experiments(changes), strict=True))
        words = last_of_each([*comparison.words, *changes])
        return cls(comparison.folder.absolute(), runs, words, {"recipe": comparison.words[0]}, changes)

    @property
    def is_comparison(self) -> bool:
        return len(self.runs) > 1

    @property
    def unfinished(self) -> dict[Path, Experiment]:
        """The runs that are not finished, or finished before the round in which they should end now."""
        return {folder: run for folder, run in self.runs.items() if not is_complete_as(folder, run)}

    @property
    def diverged(self) -> dict[Path, RaypflError]:
        """The runs that have diverged, with their errors: they would diverge again."""
        errors = {folder: divergence(folder) for folder in self.runs}
        return {folder: error for folder, error in errors.items() if error}

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is a checkpoint to continue from."""
        # Asked while an error of a run is reported, which an error of the checkpoints' location must not hide.
        with suppress(CheckpointError):
            return any(rounds_saved(folder, experiment) for folder, experiment in self.runs.items())
        return False

    @property
    def to_continue(self) -> str:
        """Sentence with the command that continues the work."""
        command = ["raypfl", "resume", str(nearby(self.folder)), *self.changes]
        return f"To continue: {shlex.join(command)}"

    @property
    def failed(self) -> set[Path]:
        """The folders of the runs whose method, clients or checkpoints failed: they would fail again as they are."""
        return {folder for folder in self.unfinished if has_failed(folder)}


def raise_for(
    work: Work,
    results: Sequence[RunResult],
    outcomes: Mapping[Path, RunOutcome],
    errors: Mapping[Path, RaypflError],
    error_of_all: RaypflError | None,
) -> None:
    """Raise an error that says how to go on, unless all runs are finished.

    Parameters
    ----------
    results : those of the runs that have ended, now or before.
    outcomes : how the runs ended that this command carried out.
    errors : those of runs that failed now, or diverged now or before.
    error_of_all : the error that ended all runs.
    """
    refused = next((error for error in [error_of_all, *errors.values()] if isinstance(error, Refused)), None)
    if refused and not (work.is_comparison and results):
        raise refused
    if error_of_all is None and not refused and any(outcome.status == STOPPED for outcome in outcomes.values()):
        error_of_all = Stopped("Stopped.")

    lines = _failures(work, errors, outcomes) if work.is_comparison else _failure(work, errors, outcomes)
    if isinstance(error_of_all, Stopped):
        raise Stopped("\n".join([*lines, f"{error_of_all} {_how_to_continue(work)}"]))
    if error_of_all:
        lines.append(str(error_of_all))
    if lines and (work.has_checkpoint or (work.is_comparison and results)):
        lines.append(_how_to_continue(work))
    elif lines and not work.diverged and not any(isinstance(error, AlreadyRunning) for error in errors.values()):
        # A comparison's folder has no description of an experiment; a resume begins its runs again.
        again = ("resume", work.folder) if work.is_comparison else ("run", work.folder / DESCRIPTION)
        command = shlex.join(["raypfl", again[0], str(nearby(again[1]))])
        nothing_saved = "No round was finished."
        if not all(map(ended_at_once, work.runs)):
            nothing_saved = f"{nearby(work.folder)} has no checkpoint that can be read."
        lines.append(f"{nothing_saved} Fix what failed; then, to start again: {command}")
    if lines:
        raise RaypflError("\n".join(filter(None, lines)))


def once_mended(to_continue: str, goal: str = "to continue") -> str:
    """Return the sentence with the command that continues work, for work that would fail again as it is."""
    return to_continue.replace("To continue", f"Fix what failed; then, {goal}", 1)


def failure(name: str, folders: Sequence[Path], error: RaypflError, again: str = "") -> str:
    """Say which of several runs diverged or failed, where they are, and why."""
    how = "diverged" if isinstance(error, Diverged) else "failed"
    return f"{name}, {how}{again} ({listed(map(nearby, folders), _MOST_FOLDERS)}): {error}"


def _failure(work: Work, errors: Mapping[Path, RaypflError], outcomes: Mapping[Path, RunOutcome]) -> list[str]:
    """Say why a run on its own failed or diverged, and how to try other settings."""
    lines = []
    for folder, error in errors.items():
        was_run = folder in outcomes
        lines.append(str(error) if was_run else f"The run diverged before, and was not trained again: {error}")
        if isinstance(error, Diverged):
            change = _worth_a_try(error, work.runs[folder])
            command = shlex.join(["raypfl", "run", str(nearby(folder / DESCRIPTION)), change])
            with suppress(CheckpointError):
                last_round = rounds_saved(folder, work.runs[folder])
                if last_round:
                    command = command_with_changes(nearby(folder), last_round, [change])
            lines.append(f"With other settings: {command}")
    return lines


def _failures(work: Work, errors: Mapping[Path, RaypflError], outcomes: Mapping[Path, RunOutcome]) -> list[str]:
    """Say why runs of a comparison failed or diverged, equal seeds together, and how to try each method otherwise."""
    folders_of: dict[str, list[Path]] = {}
    for folder, label in zip(work.runs, labels(list(work.runs.values())), strict=True):
        folders_of.setdefault(label, []).append(folder)

    lines = []
    for label, folders in folders_of.items():
        alike: dict[tuple[str, bool], list[Path]] = {}
        for folder in folders:
            if folder in errors:
                alike.setdefault((str(errors[folder]), folder in outcomes), []).append(folder)
        for (_, was_run), failed in alike.items():
            name = f"{label}, {numbered('seed', [work.runs[folder].seed for folder in failed])}"
            again = "" if was_run else f" before, and {'was' if len(failed) == 1 else 'were'} not trained again"
            lines.append(failure(name, failed, errors[failed[0]], again))

        errors_of_diverged = [errors[folder] for folder in folders if isinstance(errors.get(folder), Diverged)]
        if errors_of_diverged:
            # A method is compared with others as it is from the start, and with all of its seeds.
            seeds = [f"seeds={len(folders)}"] if len(folders) > 1 else []
            change = _worth_a_try(errors_of_diverged[0], work.runs[folders[0]])
            command = shlex.join(["raypfl", "run", str(nearby(folders[0] / DESCRIPTION)), change, *seeds])
            lines.append(f"With other settings: {command}")
    return lines


def _worth_a_try(error: RaypflError, experiment: Experiment) -> str:
    """Return a setting with which training may not diverge: what the error names, or a smaller learning rate."""
    named = str(error).partition(STANDARDISE)[2]
    return shlex.split(named)[0] if named else f"training.lr={experiment.training.lr / 10:g}"


def _how_to_continue(work: Work) -> str:
    """Say how many runs are finished, and how to continue or, where nothing is left to do, to see the results."""
    diverged = work.diverged
    unfinished = work.unfinished
    failed = work.failed
    command = work.to_continue
    if failed and unfinished.keys() <= failed | diverged.keys():
        # A resume starts runs again that have not finished a round.
        goal = "to start it again" if all(map(ended_at_once, failed)) else "to continue"
        command = once_mended(command, goal)
    if not work.is_comparison:
        return "" if diverged else command

    finished_before = sum(map(is_finished, unfinished))
    changed = ""
    if finished_before:
        changed = f" with {shlex.join(work.changes)}; earlier results exist for {finished_before}"
    finished = len(work.runs) - len(unfinished)
    if unfinished.keys() <= diverged.keys():
        command = f"To see them: {shlex.join(['raypfl', 'report', str(nearby(work.folder))])}" if finished else ""
    return f"{finished} of {len(work.runs)} runs are finished{changed}. {command}".rstrip()
