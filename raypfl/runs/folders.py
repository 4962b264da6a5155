"""Folders of runs, and of comparisons with their runs inside."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from raypfl.common import files
from raypfl.common.errors import ConfigError, NoRun
from raypfl.experiment import Experiment
from raypfl.experiment.assignments import parse_assignments
from raypfl.experiment.comparison import refuse_unknown_options
from raypfl.experiment.yaml_text import read, write
from raypfl.methods import METHODS
from raypfl.runs.records import COMPARISON, METADATA, description, write_description
from raypfl.runs.resuming import resumed, without_options_of_others
from raypfl.storage.filesystems import join

_SETTINGS_OF_COMPARISON = ("method", "methods", "seed", "seeds", "name", "output")


def new_folder(experiment: Experiment) -> Path:
    """Return a new folder in ``experiment.output``, named after experiment, method, seed and time."""
    return _make_folder(experiment.output, f"{experiment.name}-{_short_name(experiment)}-{_now()}")


@dataclass(frozen=True)
class ComparisonFolder:
    """Runs in one folder. All descriptions are there from the start; runs begin one after the other.

    Attributes
    ----------
    folder : the comparison's folder.
    words : the command line that started it: the recipe or file, and the assignments that changed it.
    runs : names of the runs' folders inside, in order.
    """

    folder: Path
    words: tuple[str, ...]
    runs: tuple[str, ...]

    @classmethod
    def new(cls, experiments: Sequence[Experiment], words: Sequence[str], folder: Path | None = None) -> Self:
        """Make a comparison of these experiments, ready to be resumed.

        `folder` : the comparison's folder; None: a new one in their ``output``.

        Raises
        ------
        ConfigError : if another run has begun where one of its runs would be.
        """
        if folder is None:
            first = experiments[0]
            folder = _make_folder(first.output, f"{first.name}-{_now()}")

        comparison = cls(folder, tuple(words), _names(experiments))
        for run_folder in comparison.folders:
            if (run_folder / METADATA).exists():
                raise ConfigError(
                    f"{run_folder} already has a run, which is not of this comparison; name another folder."
                )
        experiments = with_checkpoints_apart(experiments, folder)
        for experiment, run_folder in zip(experiments, comparison.folders, strict=True):
            write_description(run_folder, experiment)
        comparison.write(words)
        return comparison

    @classmethod
    def load(cls, folder: str | Path) -> Self | None:
        """Read the comparison in a folder; None if the folder has none."""
        file = Path(folder, COMPARISON)
        if not file.exists():
            return None

        values = read(file)
        words = values.get("words")
        runs = values.get("runs")
        if not (isinstance(words, list) and isinstance(runs, list) and words and runs):
            raise NoRun(
                f"{file} is damaged: it must have the lists words and runs, the command that started the comparison "
                "and the folders of its runs."
            )
        return cls(Path(folder), tuple(words), tuple(runs))

    def write(self, words: Sequence[str]) -> None:
        """Write the comparison's file: its runs, and the `words` of the command that would start them."""
        files.write(self.folder / COMPARISON, write({"words": list(words), "runs": list(self.runs)}))

    @property
    def folders(self) -> list[Path]:
        """The runs' folders, in order."""
        return [self.folder / run for run in self.runs]

    def experiments(self, changes: Sequence[str] = ()) -> list[Experiment]:
        """Return the experiments of the runs, with ``dotted.key=value`` changes.

        Raises
        ------
        ConfigError : if a change concerns the comparison itself, does not fit one of its runs, or would falsify it.
        """
        paths = [path for path, _ in parse_assignments(changes)]
        for path in paths:
            if len(path) == 1 and path[0] in _SETTINGS_OF_COMPARISON:
                raise ConfigError(
                    f"{path[0]} cannot be changed once a comparison has started; start another one with `raypfl run`."
                )
        before = [description(folder) for folder in self.folders]
        refuse_unknown_options(before, [path for path in paths if path[0] == "method" and len(path) > 1])
        return [
            resumed(folder, without_options_of_others(experiment, changes))
            for folder, experiment in zip(self.folders, before, strict=True)
        ]

    def discard_unstarted(self) -> None:
        """Delete the folders that `new` made, if no run has begun."""
        if any((folder / METADATA).exists() for folder in self.folders):
            return

        for folder in self.folders:
            shutil.rmtree(folder)
        (self.folder / COMPARISON).unlink()
        # The folder stays if the user has other files in it.
        with contextlib.suppress(OSError):
            self.folder.rmdir()


def with_checkpoints_apart(experiments: Sequence[Experiment], folder: Path) -> list[Experiment]:
    """Add the comparison's folder to ``checkpoint.location``, where runs of several comparisons may share a name."""
    location = experiments[0].checkpoint.location
    if location is None:
        return list(experiments)
    change = f"checkpoint.location={json.dumps(join(location, folder.name))}"
    return [experiment.override([change]) for experiment in experiments]


def _names(experiments: Sequence[Experiment]) -> tuple[str, ...]:
    """Return names of the folders of a comparison's runs; a number distinguishes those of one method and seed."""
    names: list[str] = []
    uses: Counter[str] = Counter()
    for experiment in experiments:
        name = _file_name(_short_name(experiment))
        uses[name] += 1
        names.append(name if uses[name] == 1 else f"{name}-{uses[name]}")
    return tuple(names)


def _short_name(experiment: Experiment) -> str:
    method = METHODS.name_of(type(experiment.method)).rpartition(":")[2].lower()
    return f"{method}-s{experiment.seed}"


def _file_name(name: str) -> str:
    """Return the name, with underscores for characters that file names should not have."""
    return re.sub(r"[^\w.-]+", "_", name)


def _now() -> str:
    return time.strftime("%Y%m%d-%H%M%S")


def _make_folder(parent: str | Path, name: str) -> Path:
    """Make a new folder; a number distinguishes those of one second."""
    name = _file_name(name)
    folder = Path(parent) / name
    number = 1
    while True:
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1
            folder = folder.with_name(f"{name}-{number}")
        except OSError as error:
            raise ConfigError(f"The folder {str(folder)!r} cannot be made: {error.strerror}; change output.") from None
