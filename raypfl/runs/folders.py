"""The folders of runs, and of comparisons with their runs inside."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from raypfl.common import files
from raypfl.common.errors import ConfigError
from raypfl.config import Experiment
from raypfl.config.assignments import parse_assignments
from raypfl.config.yaml_text import read, write
from raypfl.methods import METHODS
from raypfl.runs.result import METADATA, description, refuse_shorter, write_description

COMPARISON = "comparison.yaml"

_ITS_OWN = ("method", "methods", "seed", "seeds", "name", "output")


def new_folder(experiment: Experiment) -> Path:
    """An empty one in ``experiment.output``, named after experiment, method, seed and time."""
    return _made(experiment.output, f"{experiment.name}-{_short_name(experiment)}-{_now()}")


@dataclass(frozen=True)
class Comparison:
    """Runs in one folder. All of them are described there from the first moment; each is begun when its turn comes.

    Attributes
    ----------
    folder : of the comparison. runs : names of its runs' folders inside, in order.
    words : the recipe or file that it was started with, and the assignments that changed it.
    """

    folder: Path
    words: tuple[str, ...]
    runs: tuple[str, ...]

    @classmethod
    def new(cls, experiments: Sequence[Experiment], words: Sequence[str]) -> Comparison:
        """One of these experiments, in a folder in their ``output``, with all that it takes to resume it."""
        first = experiments[0]
        folder = _made(first.output, f"{first.name}-{_now()}")
        made = [_made(folder, _short_name(one)) for one in experiments]
        for one, inside in zip(experiments, made, strict=True):
            write_description(inside, _with_checkpoints_apart(one, folder))
        new = cls(folder, tuple(words), tuple(inside.name for inside in made))
        files.write(folder / COMPARISON, write({"words": list(new.words), "runs": list(new.runs)}))
        return new

    @classmethod
    def load(cls, folder: str | Path) -> Comparison | None:
        """The comparison in a folder; None if that is something else, such as a run's."""
        file = Path(folder, COMPARISON)
        if not file.exists():
            return None
        values = read(file)
        return cls(Path(folder), tuple(values["words"]), tuple(values["runs"]))

    @property
    def folders(self) -> list[Path]:
        """Of its runs, in order."""
        return [self.folder / run for run in self.runs]

    def experiments(self, changes: Sequence[str] = ()) -> list[Experiment]:
        """What its runs are, or are to be with ``dotted.key=value`` changes.

        Raises
        ------
        ConfigError : if a change would make it another comparison, or does not suit one of its runs.
        """
        for path, _ in parse_assignments(changes):
            if len(path) == 1 and path[0] in _ITS_OWN:
                raise ConfigError(
                    f"{path[0]} cannot be changed in a comparison that has been started: it has its methods, seeds and "
                    f"folder. Start another one with `raypfl run`."
                )
        planned = [description(folder).override(changes) for folder in self.folders]
        for folder, experiment in zip(self.folders, planned, strict=True):
            refuse_shorter(folder, experiment)
        return planned

    def forget_unbegun(self) -> None:
        """Take `new` back, unless one of the runs has begun since."""
        if not any((folder / METADATA).exists() for folder in self.folders):
            shutil.rmtree(self.folder)


def _with_checkpoints_apart(experiment: Experiment, folder: Path) -> Experiment:
    """In a location of many runs, each has its checkpoints by the name of its folder: here names are short."""
    location = experiment.checkpoint.location
    if location is None:
        return experiment
    apart = f"{location.rstrip('/')}/{folder.name}"
    return experiment.override([f"checkpoint.location={json.dumps(apart)}"])


def _short_name(experiment: Experiment) -> str:
    method = METHODS.name_of(type(experiment.method)).rpartition(":")[2].lower()
    return f"{method}-s{experiment.seed}"


def _now() -> str:
    return time.strftime("%Y%m%d-%H%M%S")


def _made(parent: str | Path, name: str) -> Path:
    """A new folder; a number tells it from one of the same second or, in a comparison, of the same method."""
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
