"""The result of a sweep: its trials in order, the best configuration, and the files in its folder."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from raypfl.common.counting import counted
from raypfl.common.errors import ConfigError
from raypfl.common.files import locked, make_folder, write
from raypfl.evaluation import Measures
from raypfl.experiment.spaces import in_words, values_by_column
from raypfl.experiment.yaml_text import write as as_yaml
from raypfl.integrations.tuning.pictures import draw_configurations, draw_importances, importances
from raypfl.integrations.tuning.search import TUNE, check, search
from raypfl.integrations.tuning.sweep import Sweep, load
from raypfl.integrations.tuning.trial import Trial, TrialListener, metric_names, run_folder, schedule_of
from raypfl.results.report.export import csv_text
from raypfl.results.report.searches.folders import CONFIGURATIONS, IMPORTANCE
from raypfl.results.units import Unit
from raypfl.runs.records import TRIALS

if TYPE_CHECKING:
    from ray.tune import ResultGrid

BEST = "best.yaml"


def tune(
    source: Sweep | str | Path | Mapping[str, Any],
    assignments: Iterable[str] = (),
    *,
    hear: TrialListener = lambda trial, seed, event: None,
    show: Callable[[SweepResult], None] = lambda result: None,
) -> SweepResult:
    """Run what is left of a sweep, and write its result into its folder ``OUTPUT/NAME``.

    Parameters
    ----------
    source, assignments : the sweep, as :func:`raypfl.integrations.tuning.sweep.load` takes it.
    hear : a function that is called with a trial's name, a seed's number and every event of that run.
    show : a function that is called with the result so far, whenever a trial has changed.

    Raises
    ------
    ConfigError : before anything runs, if something in the sweep is wrong, or another process carries it out.
    """
    sweep = source if isinstance(source, Sweep) else load(source, assignments)
    first, modes = check(sweep)

    def result_of(trials: Sequence[Trial]) -> SweepResult:
        return SweepResult(sweep, trials, modes, first.measures)

    with _alone(sweep):
        trials = search(sweep, first, modes, sweep.folder, hear, lambda trials: show(result_of(trials)))
        result = result_of(trials)
        if result.trials:
            result.write_files()
    return result


@contextlib.contextmanager
def _alone(sweep: Sweep) -> Iterator[None]:
    """While active, no other process of this machine carries out the sweep.

    Raises
    ------
    ConfigError : if another one does.
    """
    make_folder(sweep.folder.parent)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(sweep.folder, wait=False))
        except BlockingIOError as error:
            raise ConfigError(
                f"The sweep in {sweep.folder} is already running in another process. Wait for it to end, or stop it "
                "there."
            ) from error
        yield


@dataclass(frozen=True)
class SweepResult:
    """The trials of a sweep so far.

    Attributes
    ----------
    trials : the trials, in the order of their names.
    modes : ``max`` or ``min`` for each metric.
    measures : the metrics of the experiment.
    """

    sweep: Sweep
    trials: Sequence[Trial]
    modes: Sequence[str]
    measures: Measures

    @property
    def folder(self) -> Path:
        """The sweep's folder."""
        return self.sweep.folder

    @property
    def units(self) -> dict[str, Unit]:
        """The unit of each metric, by name."""
        names = metric_names(self.sweep, self.measures)
        values = [target.value or self.measures.primary.name for target in self.sweep.metric]
        return {name: Unit(self.measures.metric_of(value)) for name, value in zip(names, values, strict=True)}

    @property
    def name(self) -> str:
        """The name of the first metric."""
        return next(iter(self.units))

    @property
    def ranked(self) -> list[Trial]:
        """The trials with a value, the best first by the first metric; then those without."""
        sign = -1 if self.modes[0] == "max" else 1

        def rank(trial: Trial) -> tuple[bool, float, str]:
            value = trial.defined.get(self.name)
            return value is None, sign * (value or 0.0), trial.name

        return sorted(self.trials, key=rank)

    @property
    def best(self) -> Trial | None:
        """The trial with the best value of the first metric; None if no trial has one."""
        if not self.trials:
            return None
        first = self.ranked[0]
        return first if self.name in first.defined else None

    @property
    def schedule(self) -> list[tuple[int, dict[str, Any]]]:
        """The best trial's searched settings, each with the number of rounds after which they began to hold.

        There are several entries only if PBT or PB2 changed the settings. Rounds in checkpoints of other trials count.
        """
        if self.best is None:
            return []
        parts = schedule_of(run_folder(self.sweep, self.folder, self.best.name, 0))
        if not parts:
            return [(0, values_by_column(self.sweep.spaces, self.best.drawn))]
        return [(part["after"], values_by_column(self.sweep.spaces, part["drawn"])) for part in parts]

    @property
    def changes(self) -> list[str]:
        """Lines on how a scheduler changed the best trial's settings during training; empty if none did."""
        if self.best is None or len(self.schedule) < 2:
            return []
        value = self.best.values[self.name]
        starts = [after for after, _ in self.schedule]
        ends = [*starts[1:], self.best.round]

        lines = [
            f"A run of this file need not reach {self.name} {value:.4g}: {self.sweep.scheduler.name} changed the best",
            f"trial's settings on the way. The file has the last ones; trials/{self.best.name} is the run itself.",
        ]
        for (start, settings), end in zip(self.schedule, ends, strict=True):
            assignments = ", ".join(f"{key}={value}" for key, value in settings.items())
            lines.append(f"  rounds {start + 1} to {end}: {assignments}")
        return lines

    @property
    def is_complete(self) -> bool:
        """Whether every trial came to an end."""
        return all(trial.has_ended for trial in self.trials)

    @property
    def status(self) -> Literal["finished", "stopped", "failed"]:
        """``stopped`` if trials are left, ``failed`` if none has a value, else ``finished``."""
        if not self.is_complete:
            return "stopped"
        return "failed" if self.best is None else "finished"

    @property
    def grid(self) -> ResultGrid:
        """Ray Tune's results, for its own tools and as a table: ``result.grid.get_dataframe()``.

        Raises
        ------
        ConfigError : if the trials were carried out without Ray Tune; `rows` has their table.
        """
        from ray.tune import ExperimentAnalysis, ResultGrid

        if not (self.folder / TUNE).exists():
            raise ConfigError(
                f"The sweep {self.sweep.name!r} ran without Ray Tune, which has no results of it; rows() has a table. "
                "With tensorboard: true, a sweep runs on Ray Tune."
            )
        path = str(self.folder / TUNE)
        return ResultGrid(ExperimentAnalysis(path, default_metric=self.name, default_mode=self.modes[0]))

    @property
    def searched(self) -> list[str]:
        """The settings that were searched."""
        return list(dict.fromkeys(space.key for space in self.sweep.spaces))

    @property
    def never_drawn(self) -> list[str]:
        """Values of choices that no configuration has, such as ``method=ditto``."""
        missing = []
        for space in self.sweep.spaces:
            if space.is_range or space.owner:
                continue
            drawn = [space.value(trial.drawn[space.name]) for trial in self.trials]
            missing += [f"{space.key}={in_words(value)}" for value in space.values if value not in drawn]
        return missing

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each trial, the best first: trial, status, round, the metrics, the settings, error."""
        rows = []
        for trial in self.ranked:
            settings = values_by_column(self.sweep.spaces, trial.drawn)
            rows.append(
                {
                    "trial": trial.name,
                    "status": trial.status,
                    "round": trial.round,
                    **{name: trial.defined.get(name) for name in self.units},
                    **{key: settings.get(key) for key in self.searched},
                    "error": trial.error,
                }
            )
        return rows

    @property
    def files(self) -> list[Path]:
        """The files in the sweep's folder that are for a person to read."""
        names = (TRIALS, BEST, CONFIGURATIONS, IMPORTANCE)
        return [self.folder / name for name in names if (self.folder / name).exists()]

    def write_files(self) -> None:
        """Write the table, the best configuration and the pictures into the sweep's folder."""
        write(self.folder / TRIALS, csv_text(self.rows()))

        if self.best is not None:
            heading = [self._heading(), *self.changes]
            comment = "".join(f"# {line}\n" for line in heading)
            write(self.folder / BEST, comment + as_yaml(self.sweep.settings(self.best.drawn)))
            self._draw()

    def _heading(self) -> str:
        count = len(self.trials)
        ended = sum(trial.has_ended for trial in self.trials)
        if ended < count:
            return f"The best so far in the sweep {self.sweep.name}, of which {ended} of {count} trials have ended."
        return f"The best of {counted(count, 'configuration')} of the sweep {self.sweep.name}."

    def _draw(self) -> None:
        trials = [trial for trial in self.trials if math.isfinite(trial.values.get(self.name, math.nan))]
        if not trials:
            return
        configurations = [trial.drawn for trial in trials]
        unit = self.units[self.name]
        values = unit.of([trial.values[self.name] for trial in trials])
        label = f"{self.name}{' (%)' if unit.sign else ''}"
        draw_configurations(self.sweep.spaces, configurations, values, label, self.folder / CONFIGURATIONS)

        shares = importances(self.sweep.spaces, configurations, values)
        if shares:
            draw_importances(shares, len(trials), self.name, self.folder / IMPORTANCE)
