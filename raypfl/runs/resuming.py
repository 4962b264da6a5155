"""What may change when a run is resumed, and runs that continue another one from a round."""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from raypfl.common.errors import CheckpointError, ConfigError, Refused
from raypfl.data.datasets.population import is_described
from raypfl.engine import history
from raypfl.engine.job import checkpoints_of
from raypfl.experiment import Experiment
from raypfl.experiment.assignments import flatten
from raypfl.experiment.identity import differences, is_in
from raypfl.experiment.yaml_text import parse
from raypfl.models.weights import is_file
from raypfl.runs.result import METADATA, RECIPE, SUMMARY, description, refuse_shorter, rounds_saved, write_description
from raypfl.storage import checkpoint

MAY_CHANGE = (
    *("rounds", "evaluation.patience"),  # when it ends, if the rounds before are the same
    *("data.root", "data.download", "data.cache", "data.pools.*.root", "data.pools.*.download"),  # to the same samples
    "model.weights",  # to the same weights in another place
    *("engine.backend", "ray.*", "failures.retries", "failures.deaths"),  # where it runs
    *("checkpoint.*", "tracking.*"),  # how often it is saved, where it is shown
)
"""Settings that may change when a run is resumed. All others decide its result, and stay."""

_OF_THE_STATE = ("model", "method.name", "objective", "training.precision", "evaluation.metrics", "privacy")
"""Settings that the state or the tables of a checkpoint depend on; a run that continues from it must keep them."""

_OF_THE_FOLDER = ("name", "output")


def resumed(run_dir: str | Path, overrides: Sequence[str]) -> Experiment:
    """The experiment of a run that is to be resumed, with ``dotted.key=value`` changes.

    Raises
    ------
    ConfigError : if a change would falsify what the run has recorded.
    """
    begun = description(run_dir)
    asked = begun.override(overrides)
    refuse_changes(run_dir, asked, begun)
    return asked


def may_change(key: str) -> bool:
    """Whether a setting may change when a run is resumed."""
    return any(fnmatchcase(key, pattern) for pattern in MAY_CHANGE)


def ends_later(asked: Experiment, begun: Experiment) -> bool:
    """Whether a finished run, with these changes, may have something left to do."""
    return (asked.rounds, asked.evaluation.patience) != (begun.rounds, begun.evaluation.patience)


def refuse_changes(run_dir: str | Path, asked: Experiment, begun: Experiment) -> None:
    """Raise a ConfigError if the run that has `begun` cannot be resumed as it is `asked` for."""
    wrong = [key for key in _changes(asked, begun) if not may_change(key)]
    if is_described(begun.data) and asked.data.root != begun.data.root:  # whose samples have no fingerprint
        wrong.append("data.root")
    if not all(weights and is_file(weights) for weights in (asked.model.weights, begun.model.weights)):
        wrong += [key for key in _changes(asked, begun) if key == "model.weights"]
    if wrong:
        raise ConfigError(_falsifying(run_dir, wrong, asked, begun))
    _refuse_less_patience(run_dir, asked, begun)
    _refuse_empty_location(run_dir, asked, begun)
    refuse_shorter(run_dir, asked)
    _refuse_other_rates(run_dir, asked, begun)


def refuse_another(folder: Path, asked: Experiment, begun: Experiment) -> None:
    """Raise a ConfigError unless the run in a folder is the requested one."""
    keys = differences(asked, begun)
    if asked.checkpoint.location != begun.checkpoint.location:
        keys.append("checkpoint.location")
    if keys:
        wanted, there = flatten(asked.to_dict()), flatten(begun.to_dict())
        listed = ", ".join(f"{key} is {there.get(key)!r} there, not {wanted.get(key)!r}" for key in keys[:3])
        more = f", and {len(keys) - 3} more settings differ" if len(keys) > 3 else ""
        text = f"{folder} has another run: {listed}{more}. Name another folder"
        if all(map(may_change, keys)):
            text += f", or change the run that is there: `raypfl resume {folder} KEY=VALUE`"
        raise ConfigError(f"{text}.")


@contextlib.contextmanager
def continued(run_dir: str | Path, round: int, new_run_dir: str | Path, overrides: Sequence[str]) -> Iterator[Path]:
    """The folder of a new run that continues another one after a round; deleted if the run is refused before it begins.

    Raises
    ------
    ConfigError : if there is a run in the new folder, or the changes do not suit the checkpoint.
    CheckpointError : if there is no checkpoint of that round.
    """
    parent, folder = Path(run_dir).resolve(), Path(new_run_dir).resolve()
    begun = description(parent)
    asked = begun.override(overrides)
    if (folder / RECIPE).exists():
        raise ConfigError(f"{folder} already has a run; name another folder.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not an empty folder; name a new one.")
    _refuse_unfit(parent, round, folder, asked, begun)
    branch(parent, round, folder, asked)
    try:
        yield folder
    except (Refused, CheckpointError):
        if not (folder / METADATA).exists():
            checkpoint.forget(checkpoints_of(asked, str(folder)))
            shutil.rmtree(folder)
        raise


def branch(parent: Path, round: int, folder: Path, experiment: Experiment) -> None:
    """Make `folder` that of a run which continues another one after a round; its own checkpoints are replaced.

    Raises
    ------
    CheckpointError : if there is no checkpoint of that round.
    """
    source = checkpoints_of(description(parent), str(parent))
    checkpoint.adopt(source, round, checkpoints_of(experiment, str(folder)))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SUMMARY).unlink(missing_ok=True)  # of what was there before
    history.inherit(parent, round, folder, experiment)
    write_description(folder, experiment)


def _changes(asked: Experiment, begun: Experiment) -> list[str]:
    wanted, there = flatten(asked.to_dict()), flatten(begun.to_dict())
    return [key for key in {**there, **wanted} if wanted.get(key) != there.get(key)]


def _of_state(key: str) -> bool:
    return key != "model.weights" and any(is_in(key, section) for section in _OF_THE_STATE)


def _falsifying(run_dir: str | Path, wrong: Sequence[str], asked: Experiment, begun: Experiment) -> str:
    """Why settings stay, and how to run with others."""
    wanted, there = flatten(asked.to_dict()), flatten(begun.to_dict())
    key = wrong[0]
    text = f"{key} is {there.get(key)!r} in the run in {run_dir}"
    if key in _OF_THE_FOLDER:
        return f"{text}, which has its folder already; leave it out."
    text += f", not {wanted.get(key)!r}, and decides its result"
    text += f", as do {', '.join(wrong[1:3])}." if wrong[1:] else "."
    rounds = checkpoint.rounds(checkpoints_of(begun, str(run_dir)))
    if not rounds or any(_of_state(key) or is_in(key, "data") or is_in(key, "partition") for key in wrong):
        return f"{text} Start another run for that, with `raypfl run`."
    changes = [f"{key}={_as_yaml(wanted[key])}" for key in _changes(asked, begun) if key in wanted]
    before_end = [done for done in rounds if done < asked.rounds]
    if not before_end:
        changes.append(f"rounds={2 * asked.rounds}")
    words = ["--from-round", str(max(before_end or rounds)), "--as", "NEWRUN", *changes]
    return f"{text} A new run can continue with it: `{shlex.join(['raypfl', 'resume', str(run_dir), *words])}`."


def _as_yaml(value: object) -> str:
    with contextlib.suppress(ConfigError):
        if isinstance(value, str) and parse(value, "The value") == value:
            return value
    return json.dumps(value)


def _refuse_less_patience(run_dir: str | Path, asked: Experiment, begun: Experiment) -> None:
    now, before = asked.evaluation.patience, begun.evaluation.patience
    if now != before and (before is None or (now is not None and now < before)):
        raise ConfigError(
            f"evaluation.patience is {before} in the run in {run_dir}, not {now}: with less patience it might have "
            "ended before. Give more, or start another run with `raypfl run`."
        )


def _refuse_empty_location(run_dir: str | Path, asked: Experiment, begun: Experiment) -> None:
    if asked.checkpoint.location == begun.checkpoint.location or rounds_saved(run_dir, asked):
        return
    with contextlib.suppress(CheckpointError):  # the place where they were may be gone
        if not rounds_saved(run_dir, begun):
            return
    raise ConfigError(
        f"checkpoint.location {asked.checkpoint.location!r} has no checkpoint of this run, which would begin again. "
        f"Copy {checkpoints_of(begun, str(run_dir))} to {checkpoints_of(asked, str(run_dir))} first."
    )


def _refuse_other_rates(run_dir: str | Path, asked: Experiment, begun: Experiment) -> None:
    """The learning rates of the rounds that are done must be those of the rounds that are asked for."""
    done = rounds_saved(run_dir, asked)
    then, now = (
        [experiment.training.learning_rate(round, experiment.rounds) for round in range(done)]
        for experiment in (begun, asked)
    )
    if then != now:
        raise ConfigError(
            f"rounds is {begun.rounds} in the run in {run_dir}, not {asked.rounds}: training.schedule is "
            f"{begun.training.schedule!r}, by which the learning rates of its {done} rounds would have been others. "
            "Start another run with `raypfl run`."
        )


def _refuse_unfit(parent: Path, round: int, folder: Path, asked: Experiment, begun: Experiment) -> None:
    """Raise a ConfigError unless a run can continue another one's checkpoint as it is asked for."""
    wanted, there = flatten(asked.to_dict()), flatten(begun.to_dict())
    for key in filter(_of_state, _changes(asked, begun)):
        raise ConfigError(
            f"{key} is {there.get(key)!r} in {parent}, not {wanted.get(key)!r}, and the checkpoint depends on it; "
            "leave it as it is, or start another run with `raypfl run`."
        )
    if asked.analyses:
        raise ConfigError("analyses observe a run from its first round on; leave them out here, with 'analyses=[]'.")
    if asked.rounds <= round:
        raise ConfigError(
            f"rounds is {asked.rounds}, so nothing is left to do after round {round}; give more, as rounds={2 * round}."
        )
    if checkpoint.rounds(place := checkpoints_of(asked, str(folder))):
        raise ConfigError(f"{place} has checkpoints of another run; name another folder than {folder.name}.")
