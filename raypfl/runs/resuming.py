"""What may change when a run is resumed, and runs that continue another one from a round."""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from types import FunctionType

from raypfl.common.counting import series
from raypfl.common.errors import CheckpointError, ConfigError, NoRun, Refused
from raypfl.common.files import make_folder
from raypfl.data.datasets.population import is_described
from raypfl.engine import history
from raypfl.engine.job import checkpoints_of
from raypfl.experiment import Experiment
from raypfl.experiment.assignments import flatten, parse_assignments
from raypfl.experiment.identity import code_digests, differences, is_in
from raypfl.experiment.yaml_text import parse
from raypfl.learning.recording.python_state import names_in
from raypfl.methods import Method
from raypfl.models.weights import is_file
from raypfl.runs.records import (
    DESCRIPTION,
    METADATA,
    SUMMARY,
    description,
    is_finished,
    recorded_metadata,
    rounds_saved,
    write_description,
)
from raypfl.storage import checkpoints

MAY_CHANGE = (
    # When the run ends, if the rounds before are the same.
    "rounds",
    "evaluation.patience",
    # Where the samples are, if they are the same.
    "data.root",
    "data.download",
    "data.cache",
    "data.pools.*.root",
    "data.pools.*.download",
    # Where the initial weights are, if they are the same.
    "model.weights",
    # Where the run computes.
    "engine.backend",
    "engine.cuda_graphs",
    "ray.*",
    "failures.retries",
    "failures.deaths",
    # How often it is saved, and where it is shown.
    "checkpoint.*",
    "tracking.*",
)
"""Settings that may change when a run is resumed. All others decide its result, and must stay."""

_CHECKPOINT_NEEDS = (
    "partition",
    "model",
    "method.name",
    "objective",
    "training.precision",
    "evaluation.metrics",
    "privacy",
)
"""Settings that the state or the tables of a checkpoint depend on; a run that continues from it must keep them."""

_FOLDER_NEEDS = ("name", "output")
"""Settings that decide a run's folder."""


def resumed(run_dir: str | Path, overrides: Sequence[str]) -> Experiment:
    """Return the experiment of a run to resume, with ``dotted.key=value`` changes.

    Raises
    ------
    ConfigError : if a change would falsify what the run has recorded.
    """
    before = description(run_dir)
    experiment = before.override(overrides)
    refuse_changes(run_dir, experiment, before)
    return experiment


def without_options_of_others(experiment: Experiment, changes: Sequence[str]) -> list[str]:
    """Leave out changes ``method.KEY=value`` of options that only other methods of a comparison have."""
    options = experiment.to_dict()["method"]
    applicable = []
    for change in changes:
        ((path, _),) = parse_assignments([change])
        if path[0] != "method" or len(path) == 1 or path[1] in options:
            applicable.append(change)
    return applicable


def may_change(key: str) -> bool:
    """Return whether a setting may change when a run is resumed."""
    return any(fnmatchcase(key, pattern) for pattern in MAY_CHANGE)


def notice_of_edited_code(run_dir: Path, experiment: Experiment) -> str:
    """Return a sentence if code of the user's own was edited since the run last began; else an empty text."""
    try:
        recorded = recorded_metadata(run_dir).get("code", {})
    except NoRun:
        return ""
    digests = code_digests(experiment.to_dict())
    edited = [module for module, digest in digests.items() if recorded.get(module, digest) != digest]
    if not edited:
        return ""
    return (
        f"{series(edited)} (or what it imports) was edited since the run in {run_dir} began: its rounds so "
        "far used the code from before the edit. For results of the new code alone, start a run in another folder."
    )


def ends_later(experiment: Experiment, before: Experiment) -> bool:
    """Return whether a run that finished as described `before` may have rounds left as `experiment`."""
    return (experiment.rounds, experiment.evaluation.patience) != (before.rounds, before.evaluation.patience)


def is_complete_as(run_dir: Path, experiment: Experiment) -> bool:
    """Return whether a run is finished, also as `experiment`, which may have more rounds than before."""
    return is_finished(run_dir) and not ends_later(experiment, description(run_dir))


def refuse_changes(run_dir: str | Path, experiment: Experiment, before: Experiment) -> None:
    """Raise a ConfigError if the run that was described `before` cannot be resumed as `experiment`."""
    changed = _changed_keys(experiment, before)
    refused = [key for key in changed if not may_change(key)]
    # The samples of a described population have no fingerprint by which they could be recognised elsewhere.
    if is_described(before.data) and experiment.data.root != before.data.root:
        refused.append("data.root")
    # Likewise weights that are no file, which have no hash.
    if "model.weights" in changed and not (_has_weights_file(experiment) and _has_weights_file(before)):
        refused.append("model.weights")
    if refused:
        raise ConfigError(_why_refused(run_dir, refused, experiment, before))

    _refuse_empty_location(run_dir, experiment, before)
    _refuse_other_end(run_dir, experiment, before)


def refuse_other_run(folder: Path, experiment: Experiment, before: Experiment, to_resume: Path) -> None:
    """Raise a ConfigError unless the run in a folder, described as `before`, is a run of the experiment.

    `to_resume` : the folder that the error names for a resume: the run's, or that of its comparison.
    """
    keys = differences(experiment, before)
    if experiment.checkpoint.location != before.checkpoint.location:
        keys.append("checkpoint.location")
    if not keys:
        return

    text = f"{folder} has another run: {_listed(keys, experiment, before)}. Name another folder"
    if all(map(may_change, keys)):
        text += f", or change what is there: `raypfl resume {to_resume} KEY=VALUE`"
    raise ConfigError(f"{text}.")


def refuse_other_checkpoints(folder: Path, experiment: Experiment) -> None:
    """Raise a ConfigError if a run that has not begun in its folder would continue the checkpoints of another one.

    Where checkpoints are kept apart from the folder they outlive it, so they may be of any run whose folder had its
    name. Those of the same run are continued.

    Raises
    ------
    CheckpointError : if there are checkpoints, but none that can be read.
    """
    if experiment.checkpoint.location is None or history.read(folder):
        return
    location = checkpoints_of(experiment, str(folder))
    snapshot = checkpoints.load(location, lambda text: None, whole=False)
    if snapshot is None:
        return

    before = Experiment.from_record(snapshot.meta["experiment"])
    keys = [key for key in differences(experiment, before) if not may_change(key)]
    if keys:
        raise ConfigError(
            f"{location} has checkpoints of another run: {_listed(keys, experiment, before)}. Name another folder than "
            f"{folder.name}, or another checkpoint.location."
        )
    _refuse_other_end(folder, experiment, before)


@contextlib.contextmanager
def continued(run_dir: str | Path, round: int, new_run_dir: str | Path, overrides: Sequence[str]) -> Iterator[Path]:
    """Make the folder of a run that continues another one; delete it if the new run is refused before it begins.

    Raises
    ------
    ConfigError : if there is a run in the new folder, or the changes do not suit the checkpoint.
    CheckpointError : if there is no checkpoint of that round.
    """
    parent = Path(run_dir).resolve()
    folder = Path(new_run_dir).resolve()
    before = description(parent)
    experiment = before.override(overrides)
    if (folder / DESCRIPTION).exists():
        raise ConfigError(f"{folder} already has a run; name another folder.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not an empty folder; name a new one.")
    _refuse_unfit(parent, round, folder, experiment, before)

    branch(parent, round, folder, experiment)
    try:
        yield folder
    except (Refused, CheckpointError):
        if not (folder / METADATA).exists():
            checkpoints.delete_all(checkpoints_of(experiment, str(folder)))
            shutil.rmtree(folder)
        raise


def branch(parent: Path, round: int, folder: Path, experiment: Experiment) -> None:
    """Make a run in `folder` that continues another one after a round; it replaces the folder's checkpoints.

    Raises
    ------
    CheckpointError : if there is no checkpoint of that round.
    """
    source = checkpoints_of(description(parent), str(parent))
    checkpoints.copy_round(source, round, checkpoints_of(experiment, str(folder)))
    make_folder(folder)
    # A run that was in the folder before may have left its summary.
    (folder / SUMMARY).unlink(missing_ok=True)
    history.inherit(parent, round, folder, experiment)
    write_description(folder, experiment)


def _changed_keys(experiment: Experiment, before: Experiment) -> list[str]:
    """Return the dotted names of the settings in which two experiments differ."""
    requested = flatten(experiment.to_dict())
    recorded = flatten(before.to_dict())
    return [key for key in {**recorded, **requested} if requested.get(key) != recorded.get(key)]


def _listed(keys: Sequence[str], experiment: Experiment, before: Experiment) -> str:
    """Say how the first settings of these differ, ``training.lr is 0.1 there, not 0.3``."""
    requested = flatten(experiment.to_dict())
    recorded = flatten(before.to_dict())
    listed = ", ".join(f"{key} is {recorded.get(key)!r} there, not {requested.get(key)!r}" for key in keys[:3])
    return f"{listed}, and {len(keys) - 3} more settings differ" if len(keys) > 3 else listed


def _has_weights_file(experiment: Experiment) -> bool:
    weights = experiment.model.weights
    return weights is not None and is_file(weights)


def _decides_checkpoint(key: str) -> bool:
    return key != "model.weights" and any(is_in(key, section) for section in _CHECKPOINT_NEEDS)


def keys_of_checkpoint(experiment: Experiment, before: Experiment) -> list[str]:
    """Return the settings that differ between two runs and on which checkpoints depend."""
    return [key for key in _changed_keys(experiment, before) if _decides_checkpoint(key)]


def _why_refused(run_dir: str | Path, refused: Sequence[str], experiment: Experiment, before: Experiment) -> str:
    """Return why settings cannot change, and how to run with other ones."""
    requested = flatten(experiment.to_dict())
    recorded = flatten(before.to_dict())
    key = refused[0]
    text = f"{key} is {recorded.get(key)!r} in the run in {run_dir}"
    if key in _FOLDER_NEEDS:
        return f"{text}, which has its folder already; leave it out."

    text += f", not {requested.get(key)!r}, and decides its result"
    text += f", as do {', '.join(refused[1:3])}." if refused[1:] else "."
    rounds = checkpoints.rounds(checkpoints_of(before, str(run_dir)))
    needs_new_run = any(_decides_checkpoint(key) or is_in(key, "data") for key in refused)
    if not rounds or needs_new_run:
        return f"{text} Start another run for that, with `raypfl run`."

    changes = [f"{key}={_as_yaml(requested[key])}" for key in _changed_keys(experiment, before) if key in requested]
    rounds_before_end = [round for round in rounds if round < experiment.rounds]
    if not rounds_before_end:
        changes.append(f"rounds={2 * experiment.rounds}")
    command = command_with_changes(run_dir, max(rounds_before_end or rounds), changes)
    return f"{text} A new run can continue with it: `{command}`."


def command_with_changes(run_dir: str | Path, from_round: int, changes: Sequence[str]) -> str:
    """Return the command with which a new run continues another one, after a round of which it has a checkpoint."""
    new_run = f"{run_dir}-from-round-{from_round}"
    words = ["raypfl", "resume", str(run_dir), "--from-round", str(from_round), "--as", new_run, *changes]
    return shlex.join(words)


def _as_yaml(value: object) -> str:
    """Return the value for the command line, quoted only if YAML would read it as something else."""
    with contextlib.suppress(ConfigError):
        if isinstance(value, str) and parse(value, "The value") == value:
            return value
    return json.dumps(value)


def _refuse_empty_location(run_dir: str | Path, experiment: Experiment, before: Experiment) -> None:
    location = experiment.checkpoint.location
    if location == before.checkpoint.location or rounds_saved(run_dir, experiment):
        return
    # The place where the checkpoints were may be gone.
    with contextlib.suppress(CheckpointError):
        if not rounds_saved(run_dir, before):
            return

    raise ConfigError(
        f"checkpoint.location {location!r} has no checkpoint of this run, which would begin again. "
        f"Copy {checkpoints_of(before, str(run_dir))} to {checkpoints_of(experiment, str(run_dir))} first."
    )


def _refuse_less_patience(run_dir: str | Path, experiment: Experiment, before: Experiment) -> None:
    requested = experiment.evaluation.patience
    recorded = before.evaluation.patience
    if requested == recorded:
        return

    # Without patience (None) a run never ends early.
    is_less = recorded is None or (requested is not None and requested < recorded)
    if is_less:
        raise ConfigError(
            f"evaluation.patience is {recorded} in the run in {run_dir}, not {requested}: with less patience it might "
            "have ended before. Give more, or start another run with `raypfl run`."
        )


def _refuse_other_end(run_dir: str | Path, experiment: Experiment, before: Experiment) -> None:
    """Raise a ConfigError if the run has gone beyond the experiment's end, or its rounds would have been different."""
    _refuse_less_patience(run_dir, experiment, before)
    finished_rounds = rounds_saved(run_dir, experiment)
    if finished_rounds > experiment.rounds:
        raise ConfigError(
            f"rounds is {experiment.rounds}, but the run in {run_dir} has already done {finished_rounds}, and rounds "
            "cannot be undone; start a new run for fewer."
        )
    if experiment.rounds == before.rounds or not finished_rounds:
        return

    name = type(before.method).__name__
    remedy = "Start another run with `raypfl run`."
    if _learning_rates(experiment, finished_rounds) != _learning_rates(before, finished_rounds):
        cause = f"with training.schedule={before.training.schedule!r}, the learning rates of"
    elif before.method.depends_on_rounds():
        cause = f"what {name} does in a round depends on their number, so"
    elif _reads_rounds(before.method):
        cause = f"{name} reads their number, so"
        remedy += f" If none depends on it, let {name} have a function depends_on_rounds(self) that returns False."
    else:
        return
    raise ConfigError(
        f"rounds is {before.rounds} in the run in {run_dir}, not {experiment.rounds}: {cause} its {finished_rounds} "
        f"rounds would have been different. {remedy}"
    )


def _reads_rounds(method: Method) -> bool:
    """Return whether a user's method reads ``task.rounds``, and does not say whether its rounds depend on it."""
    if method.has("depends_on_rounds"):
        return False
    owners = [owner for owner in type(method).__mro__ if not owner.__module__.startswith("raypfl.")]
    functions = [value for owner in owners for value in vars(owner).values() if isinstance(value, FunctionType)]
    return any("rounds" in names_in(function.__code__) for function in functions)


def _learning_rates(experiment: Experiment, rounds: int) -> list[float]:
    return [experiment.training.learning_rate(round, experiment.rounds) for round in range(rounds)]


def _refuse_unfit(parent: Path, round: int, folder: Path, experiment: Experiment, before: Experiment) -> None:
    """Raise a ConfigError unless a run can continue another one's checkpoint as `experiment`."""
    requested = flatten(experiment.to_dict())
    recorded = flatten(before.to_dict())
    keys = keys_of_checkpoint(experiment, before)
    if keys:
        key = keys[0]
        raise ConfigError(
            f"{key} is {recorded.get(key)!r} in {parent}, not {requested.get(key)!r}, and the checkpoint depends on "
            "it; leave it as it is, or start another run with `raypfl run`."
        )

    if experiment.analyses:
        raise ConfigError("analyses observe a run from its first round on; leave them out here, with 'analyses=[]'.")
    if experiment.rounds <= round:
        raise ConfigError(
            f"rounds is {experiment.rounds}, so nothing is left to do after round {round}; give more, as "
            f"rounds={2 * round}."
        )

    location = checkpoints_of(experiment, str(folder))
    if checkpoints.rounds(location):
        raise ConfigError(f"{location} has checkpoints of another run; name another folder than {folder.name}.")
