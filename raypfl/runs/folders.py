"""Folders of runs, and of comparisons with their runs inside."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from raypfl.common import files
from raypfl.common.errors import ConfigError, NoRun
from raypfl.experiment import Experiment
from raypfl.experiment.assignments import parse_assignments
from raypfl.experiment.yaml_text import read, write
from raypfl.methods import METHODS
from raypfl.runs.result import COMPARISON, METADATA, write_description
from raypfl.runs.resuming import resumed

_ITS_OWN = ("method", "methods", "seed", "seeds", "name", "output")


def new_folder(experiment: Experiment) -> Path:
    """A new folder in ``experiment.output``, named after experiment, method, seed and time."""
    return _made(experiment.output, f"{experiment.name}-{_short_name(experiment)}-{_now()}")


@dataclass(frozen=True)
class Comparison:
    """Runs in one folder. All descriptions are there from the start; runs begin one after the other.

    Attributes
    ----------
    folder : of the comparison. runs : names of the runs' folders inside, in order.
    words : the recipe or file that started it, and the assignments that changed it.
    """

    folder: Path
    words: tuple[str, ...]
    runs: tuple[str, ...]

    @classmethod
    def new(cls, experiments: Sequence[Experiment], words: Sequence[str], folder: Path | None = None) -> Comparison:
        """A comparison of these experiments, ready to be resumed.

        Parameters
        ----------
        folder : where; None: a new folder in their ``output``.
        """
        first = experiments[0]
        folder = _made(first.output, f"{first.name}-{_now()}") if folder is None else folder
        new = cls(folder, tuple(words), _names(experiments))
        for one, inside in zip(with_checkpoints_apart(experiments, folder), new.folders, strict=True):
            write_description(inside, one)
        new.keep(words)
        return new

    @classmethod
    def load(cls, folder: str | Path) -> Comparison | None:
        """The comparison in a folder; None if the folder has none."""
        file = Path(folder, COMPARISON)
        if not file.exists():
            return None
        values = read(file)
        words, runs = values.get("words"), values.get("runs")
        if not (isinstance(words, list) and isinstance(runs, list) and words and runs):
            raise NoRun(
                f"{file} is damaged: it must have the lists words and runs, the command that started the comparison "
                "and the folders of its runs."
            )
        return cls(Path(folder), tuple(words), tuple(runs))

    def keep(self, words: Sequence[str]) -> None:
        """Write into its folder which runs it has, and that these `words` would start them."""
        files.write(self.folder / COMPARISON, write({"words": list(words), "runs": list(self.runs)}))

    @property
    def folders(self) -> list[Path]:
        """Of its runs, in order."""
        return [self.folder / run for run in self.runs]

    def experiments(self, changes: Sequence[str] = ()) -> list[Experiment]:
        """The experiments of its runs, with ``dotted.key=value`` changes.

        Raises
        ------
        ConfigError : if a change concerns the comparison itself, does not fit one of its runs, or would falsify it.
        """
        for path, _ in parse_assignments(changes):
            if len(path) == 1 and path[0] in _ITS_OWN:
                raise ConfigError(
                    f"{path[0]} cannot be changed once a comparison has started; start another one with `raypfl run`."
                )
        return [resumed(folder, changes) for folder in self.folders]

    def forget_unbegun(self) -> None:
        """Undo `new` if no run has begun."""
        if not any((folder / METADATA).exists() for folder in self.folders):
            for folder in self.folders:
                shutil.rmtree(folder)
            (self.folder / COMPARISON).unlink()
            with contextlib.suppress(OSError):  # it may hold files of the person's own
                self.folder.rmdir()


def with_checkpoints_apart(experiments: Sequence[Experiment], folder: Path) -> list[Experiment]:
    """In a location with checkpoints of many runs, add the comparison's folder: names of its runs are not unique."""
    location = experiments[0].checkpoint.location
    if location is None:
        return list(experiments)
    apart = f"{location.rstrip('/')}/{folder.name}"
    return [one.override([f"checkpoint.location={json.dumps(apart)}"]) for one in experiments]


def _names(experiments: Sequence[Experiment]) -> tuple[str, ...]:
    """Of the folders of a comparison's runs; a number distinguishes those of one method and seed."""
    plain = [re.sub(r"[^\w.-]+", "_", _short_name(one)) for one in experiments]
    before = (plain[:i].count(name) for i, name in enumerate(plain))
    return tuple(f"{name}-{count + 1}" if count else name for name, count in zip(plain, before, strict=True))


def _short_name(experiment: Experiment) -> str:
    method = METHODS.name_of(type(experiment.method)).rpartition(":")[2].lower()
    return f"{method}-s{experiment.seed}"


def _now() -> str:
    return time.strftime("%Y%m%d-%H%M%S")


def _made(parent: str | Path, name: str) -> Path:
    """A new folder; a number distinguishes those of one second."""
    name = re.sub(r"[^\w.-]+", "_", name)
    folder, number = Path(parent) / name, 1
    while True:
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1
            folder = folder.with_name(f"{name}-{number}")
        except OSError as error:
            raise ConfigError(f"The folder {str(folder)!r} cannot be made: {error.strerror}; change output.") from None
