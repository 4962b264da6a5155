"""What a sweep found: its trials in order, the best configuration, and the files in its folder."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raypfl.common.files import write
from raypfl.config import Experiment
from raypfl.evaluation import Measures
from raypfl.results.units import Unit
from raypfl.tuning.pictures import draw_configurations, draw_importances, importances
from raypfl.tuning.search import Hear, check, search
from raypfl.tuning.spaces import shown
from raypfl.tuning.sweep import Sweep, load
from raypfl.tuning.trial import Show, Trial, metric_names

TABLE, BEST, CONFIGURATIONS, IMPORTANCE = "trials.csv", "best.yaml", "configurations.png", "importance.png"


def tune(
    source: Sweep | str | Path | Mapping[str, Any],
    assignments: Iterable[str] = (),
    *,
    hear: Hear = lambda trial, seed, event: None,
    show: Show = lambda trials: None,
) -> Outcome:
    """Run what is left of a sweep, and write what it found into its folder ``OUTPUT/NAME``.

    Parameters
    ----------
    source, assignments : as for :func:`raypfl.tuning.sweep.load`.
    hear : is called with a trial's name, a seed's number and every event of that run.
    show : is called with all trials that there are, whenever one has changed.

    Raises
    ------
    ConfigError : before anything runs, if something in the sweep is wrong.
    """
    sweep = source if isinstance(source, Sweep) else load(source, assignments)
    first, modes = check(sweep)
    outcome = Outcome(sweep, search(sweep, first, modes, sweep.folder, hear, show), modes, first.measures)
    if outcome.trials:
        outcome.keep()
    return outcome


@dataclass(frozen=True)
class Outcome:
    """A sweep that is over, or was interrupted.

    Attributes
    ----------
    trials : all of them, in their order. modes : ``max`` or ``min`` of each metric. measures : of the experiment.
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
    def name(self) -> str:
        """Of the first metric."""
        return metric_names(self.sweep)[0]

    @property
    def unit(self) -> Unit:
        """Of the first metric."""
        return Unit(self.measures.of(self.sweep.metric[0].value or self.measures.primary.name))

    @property
    def ranked(self) -> list[Trial]:
        """The trials with a value, the best first by the first metric; then those without."""
        sign = -1 if self.modes[0] == "max" else 1

        def rank(trial: Trial) -> tuple[float, str]:
            value = trial.values.get(self.name, math.nan)
            return (math.inf if math.isnan(value) else sign * value, trial.name)

        return sorted(self.trials, key=rank)

    @property
    def best(self) -> Experiment | None:
        """The experiment of the best configuration; None if no trial has a value."""
        first = self.ranked[0] if self.trials else None
        return self.sweep.configured(first.drawn) if first and self.name in first.values else None

    @property
    def is_complete(self) -> bool:
        """Whether every trial came to an end."""
        return all(trial.status in ("finished", "stopped", "failed") for trial in self.trials)

    def columns(self) -> list[str]:
        """The settings that were searched."""
        return list(dict.fromkeys(space.key for space in self.sweep.spaces))

    def rows(self) -> list[dict[str, Any]]:
        """A row for each trial, the best first: trial, status, round, the metrics, the settings, error."""
        spaces = self.sweep.spaces
        return [
            {
                "trial": trial.name,
                "status": trial.status,
                "round": trial.round,
                **{name: trial.values.get(name) for name in metric_names(self.sweep)},
                **{key: shown(spaces, trial.drawn).get(key) for key in self.columns()},
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
            heading = f"# The best of {len(self.trials)} configurations of the sweep {self.sweep.name}.\n"
            write(self.folder / BEST, heading + self.best.to_yaml())
            self._draw()

    def _draw(self) -> None:
        valued = [trial for trial in self.trials if math.isfinite(trial.values.get(self.name, math.nan))]
        drawn = [trial.drawn for trial in valued]
        values = self.unit.of([trial.values[self.name] for trial in valued])
        label = f"{self.name}: {self.unit.label}"
        draw_configurations(self.sweep.spaces, drawn, values, label, self.folder / CONFIGURATIONS)
        if shares := importances(self.sweep.spaces, drawn, values):
            draw_importances(shares, self.unit.words, self.folder / IMPORTANCE)
