"""The description of a job: the words after `raypfl submit`, the files that they name, and the paths in those."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raypfl.common.errors import ConfigError
from raypfl.common.packaged_yaml import is_file_name
from raypfl.common.user_modules import modules_named_in
from raypfl.experiment import experiments
from raypfl.experiment.assignments import parse_assignments
from raypfl.experiment.recipes import settings_of
from raypfl.experiment.yaml_text import read
from raypfl.integrations.tuning.checks.fit import refuse_unfit
from raypfl.integrations.tuning.sweep import load as load_sweep
from raypfl.models.weights import is_file
from raypfl.studies.cells import plan, select
from raypfl.studies.description import load as load_study
from raypfl.studies.search.trials import planned_trials, with_search

_PATH_SETTING = re.compile(
    r"(?:^|\.)(data(?:\.pools\.[^.]+)?\.root|datasets\.[^.]+(?:\.root)?|data\.cache|model\.weights|checkpoint\.location|tracking\.uri"
    r"|partition\.file|devices\.(?:hardware|availability)\.file)"
    r"(?:\.choice|\.grid)?$"
)
"""The keys of settings that are paths, in an experiment, a study or a sweep."""


@dataclass(frozen=True)
class Description:
    """A run, study or sweep, checked as far as possible without its data.

    Attributes
    ----------
    name : the name of the recipe, study or sweep.
    output : the folder for results.
    files : the YAML files that it is read from, as the user named them.
    values : the content of these files, unchanged.
    changes : ``dotted.key=value`` assignments.
    """

    name: str
    output: str
    files: Sequence[str]
    values: Sequence[Mapping[str, Any]]
    changes: Sequence[str]

    @classmethod
    def of_run(cls, recipe: str, changes: Sequence[str]) -> Description:
        """Return the description for the words of `raypfl run`."""
        first = experiments(settings_of(recipe), changes)[0]
        return cls(first.name, first.output, *_read([recipe]), changes)

    @classmethod
    def of_study(cls, source: str, only: Sequence[str], changes: Sequence[str]) -> Description:
        """Return the description for the words of `raypfl study`."""
        study, _ = load_study(source)
        study, other_changes = with_search(study, changes)
        selected = select(study, only)
        cells = plan(selected, other_changes)
        planned_trials(selected, cells)

        sources = [source]
        while is_file_name(sources[-1]):
            base = read(Path(sources[-1])).get("extends")
            if not isinstance(base, str):
                break
            sources.append(base)
        return cls(study.name, cells[0].experiment.output, *_read(sources), changes)

    @classmethod
    def of_sweep(cls, source: str, changes: Sequence[str]) -> Description:
        """Return the description for the words of `raypfl tune`."""
        sweep = load_sweep(source, changes)
        refuse_unfit(sweep)
        return cls(sweep.name, sweep.base.output, *_read([source, sweep.recipe]), changes)

    @property
    def modules(self) -> list[str]:
        """The user's modules that are named, as in ``my_methods:Mine``."""
        return modules_named_in(value for _, value in self._leaves())

    def refuse_lost_paths(self, run_dir: Path | None) -> None:
        """Raise a ConfigError if results would vanish with the job, or a path means nothing on the cluster.

        Parameters
        ----------
        run_dir : the folder of the run; None: it is in `output`.
        """
        # A run's folder may be elsewhere, but not the database.
        use = "" if run_dir is None else ", where MLflow's database is also with --run-dir,"
        folders = (
            (f"output{use}", self.output, "output=/shared/runs"),
            ("--run-dir", run_dir, "--run-dir /shared/runs/mine"),
        )
        mistakes = []
        for key, folder, example in folders:
            if folder is not None and not Path(folder).is_absolute():
                mistakes.append(
                    f"{key} is {str(folder)!r}, which would be in the job's working directory, and Ray deletes that "
                    f"after the job: name a folder that outlives the job and that all nodes share, such as {example}."
                )

        for key, path in self._paths():
            if _is_relative(key, path):
                mistakes.append(
                    f"{key} is {path!r}. A job takes along its description and your modules, and no other files: write "
                    "the absolute path that it has on the cluster, or a URI."
                )

        if mistakes:
            raise ConfigError("\n".join(mistakes))

    def _paths(self) -> list[tuple[str, str]]:
        """Return the settings that are paths, and their values; an assignment replaces what is in the files."""
        paths = _paths_in(self._changed_leaves())
        changed = {key for key, _ in paths}
        for values in self.values:
            paths += [(key, path) for key, path in _paths_in(_leaves(values)) if key not in changed]
        return paths

    def _leaves(self) -> Iterator[tuple[str, Any]]:
        for values in self.values:
            yield from _leaves(values)
        yield from self._changed_leaves()

    def _changed_leaves(self) -> list[tuple[str, Any]]:
        leaves: list[tuple[str, Any]] = []
        for path, value in parse_assignments(self.changes):
            leaves += _leaves(value, ".".join(path))
        return leaves


def _read(sources: Iterable[str]) -> tuple[list[str], list[dict[str, Any]]]:
    """Return those sources that are files, and their contents."""
    files = [source for source in sources if is_file_name(source)]
    return files, [read(Path(file)) for file in files]


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all values in nested mappings and lists, with their dotted keys; a list's position is no part of a key."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(inner, prefix)
    else:
        yield prefix, value


def _paths_in(leaves: Iterable[tuple[str, Any]]) -> list[tuple[str, str]]:
    paths = []
    for key, value in leaves:
        match = _PATH_SETTING.search(key)
        if match and isinstance(value, str):
            paths.append((match[1], value))
    return paths


def _is_relative(key: str, path: str) -> bool:
    if key == "model.weights" and not is_file(path):
        # The name of torchvision's or timm's pretrained weights.
        return False
    if path.startswith("sqlite"):
        return re.match(r"sqlite[^:]*:////", path) is None
    return "://" not in path and not path.startswith(("/", "~"))
