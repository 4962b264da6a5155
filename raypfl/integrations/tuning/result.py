"""What a sweep found: its trials in order, the best configuration, and the files in its folder."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from raypfl.common.files import write
from raypfl.evaluation import Measures
from raypfl.experiment.yaml_text import write as as_yaml
from raypfl.integrations.tuning.pictures import draw_configurations, draw_importances, importances
from raypfl.integrations.tuning.search import TUNE, Hear, check, search
from raypfl.integrations.tuning.spaces import in_words, shown
from raypfl.integrations.tuning.sweep import Sweep, load
from raypfl.integrations.tuning.trial import Trial, metric_names, run_folder, schedule_of
from raypfl.results.report.sweeps import CONFIGURATIONS, IMPORTANCE, TABLE
from raypfl.results.units import Unit

if TYPE_CHECKING:
    from ray.tune import ResultGrid

BEST = "best.yaml"


def tune(
    source: Sweep | str | Path | Mapping[str, Any],
    assignments: Iterable[str] = (),
    *,
    hear: Hear = lambda trial, seed, event: None,
    show: Callable[[Outcome], None] = lambda outcome: None,
) -> Outcome:
    """Run what is left of a sweep, and write what it found into its folder ``OUTPUT/NAME``.

    Parameters
    ----------
    source, assignments : as for :func:`raypfl.integrations.tuning.sweep.load`.
    hear : is called with a trial's name, a seed's number and every event of that run.
    show : is called with all trials so far, whenever one has changed.

    Raises
    ------
    ConfigError : before anything runs, if something in the sweep is wrong.
    """
    sweep = source if isinstance(source, Sweep) else load(source, assignments)
    first, modes = check(sweep)

    def of(trials: Sequence[Trial]) -> Outcome:
        return Outcome(sweep, trials, modes, first.measures)

    outcome = of(search(sweep, first, modes, sweep.folder, hear, lambda trials: show(of(trials))))
    if outcome.trials:
        outcome.keep()
    return outcome


@dataclass(frozen=True)
class Outcome:
    """What a sweep has found so far.

    Attributes
    ----------
    trials : in their order. modes : ``max`` or ``min`` of each metric. measures : of the experiment.
    """

    sweep: Sweep
    trials: Sequence[Trial]
    modes: Sequence[str]
    measures: Measures

    @property
    def folder(self) -> Path:
        """Of the sweep."""
        return self.sweep.folder

    @property
    def units(self) -> dict[str, Unit]:
        """The name of each metric -> its unit."""
        names = metric_names(self.sweep, self.measures)
        values = [target.value or self.measures.primary.name for target in self.sweep.metric]
        return {name: Unit(self.measures.of(value)) for name, value in zip(names, values, strict=True)}

    @property
    def name(self) -> str:
        """Of the first metric."""
        return next(iter(self.units))

    @property
    def ranked(self) -> list[Trial]:
        """The trials with a value, the best first by the first metric; then those without."""
        sign = -1 if self.modes[0] == "max" else 1

        def rank(trial: Trial) -> tuple[float, str]:
            value = trial.values.get(self.name, math.nan)
            return (math.inf if math.isnan(value) else sign * value, trial.name)

        return sorted(self.trials, key=rank)

    @property
    def best(self) -> Trial | None:
        """The trial with the best value of the first metric; None if no trial has one."""
        first = self.ranked[0] if self.trials else None
        return first if first and self.name in first.values else None

    @property
    def schedule(self) -> list[tuple[int, dict[str, Any]]]:
        """The best trial's settings: after how many rounds each began to hold, and the searched settings.

        More than one only where PBT or PB2 changed them. Checkpoints of other trials count as rounds of this one.
        """
        if self.best is None:
            return []
        parts = schedule_of(run_folder(self.sweep, self.folder, self.best.name, 0))
        if not parts:
            return [(0, shown(self.sweep.spaces, self.best.drawn))]
        return [(part["after"], shown(self.sweep.spaces, part["drawn"])) for part in parts]

    @property
    def changes(self) -> list[str]:
        """What to say of a best trial whose settings were changed on the way; empty for any other."""
        if self.best is None or len(self.schedule) < 2:
            return []
        value = self.best.values[self.name]
        starts = [after for after, _ in self.schedule]
        ends = [*starts[1:], self.best.round]
        return [
            f"A run of this file does not reach {self.name} {value:.4g}: {self.sweep.scheduler.name} changed the best",
            f"trial's settings on the way. The file has the last ones; trials/{self.best.name} is the run itself.",
            *(
                f"  rounds {start + 1} to {end}: {', '.join(f'{key}={number}' for key, number in settings.items())}"
                for (start, settings), end in zip(self.schedule, ends, strict=True)
            ),
        ]

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
        """What Ray Tune knows of the trials, for its own tools and as a table: ``outcome.grid.get_dataframe()``."""
        from ray.tune import ExperimentAnalysis, ResultGrid

        path = str(self.folder / TUNE)
        return ResultGrid(ExperimentAnalysis(path, default_metric=self.name, default_mode=self.modes[0]))

    @property
    def searched(self) -> list[str]:
        """The settings that were searched."""
        return list(dict.fromkeys(space.key for space in self.sweep.spaces))

    @property
    def never_drawn(self) -> list[str]:
        """Values of choices that no configuration has, such as ``method=ditto``."""
        return [
            f"{space.key}={in_words(value)}"
            for space in self.sweep.spaces
            if not space.is_range and not space.owner
            for position, value in enumerate(space.values)
            if all(trial.drawn[space.name] != position for trial in self.trials)
        ]

    def rows(self) -> list[dict[str, Any]]:
        """A row for each trial, the best first: trial, status, round, the metrics, the settings, error."""
        spaces = self.sweep.spaces
        return [
            {
                "trial": trial.name,
                "status": trial.status,
                "round": trial.round,
                **{name: trial.values.get(name) for name in self.units},
                **{key: shown(spaces, trial.drawn).get(key) for key in self.searched},
                "error": trial.error,
            }
            for trial in self.ranked
        ]

    @property
    def files(self) -> list[Path]:
        """What is in the sweep's folder for a person."""
        names = (TABLE, BEST, CONFIGURATIONS, IMPORTANCE)
        return [self.folder / name for name in names if (self.folder / name).exists()]

    def keep(self) -> None:
        """Write the table, the best configuration and the pictures into the sweep's folder."""
        rows = self.rows()
        text = io.StringIO()
        table = csv.DictWriter(text, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
        write(self.folder / TABLE, text.getvalue())
        if self.best is not None:
            heading = [f"The best of {len(self.trials)} configurations of the sweep {self.sweep.name}.", *self.changes]
            comment = "".join(f"# {line}\n" for line in heading)
            write(self.folder / BEST, comment + as_yaml(self.sweep.settings(self.best.drawn)))
            self._draw()

    def _draw(self) -> None:
        valued = [trial for trial in self.trials if math.isfinite(trial.values.get(self.name, math.nan))]
        drawn = [trial.drawn for trial in valued]
        unit = self.units[self.name]
        values = unit.of([trial.values[self.name] for trial in valued])
        label = f"{self.name}{' (%)' if unit.sign else ''}"
        draw_configurations(self.sweep.spaces, drawn, values, label, self.folder / CONFIGURATIONS)
        if shares := importances(self.sweep.spaces, drawn, values):
            draw_importances(shares, len(valued), self.name, self.folder / IMPORTANCE)
