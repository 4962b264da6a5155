"""The choice of the best trial of each row by validation data, and what is told of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from raypfl.common.counting import counted
from raypfl.common.files import write
from raypfl.experiment.spaces import configured, in_words
from raypfl.experiment.yaml_text import write as as_yaml
from raypfl.results.report.export import csv_text
from raypfl.runs.records import SEARCH, TRIALS
from raypfl.runs.result import RunResult
from raypfl.runs.several.costs import cpu_seconds
from raypfl.runs.several.worker import FAILED, RunOutcome
from raypfl.studies.cells import Position, StudyCell
from raypfl.studies.description import Study
from raypfl.studies.search.description import Search
from raypfl.studies.search.trials import SearchTrial
from raypfl.studies.table.entries import measured


@dataclass(frozen=True)
class Score:
    """What a trial reached on validation data.

    Attributes
    ----------
    value : mean over the search's seeds, in percent if it is a share; None: a run failed or has no such number.
    error : why a run failed; empty: none did.
    """

    trial: SearchTrial
    value: float | None
    error: str = ""


@dataclass(frozen=True)
class SearchOutcome:
    """All trials of a search with their scores, and the best one of each row.

    Attributes
    ----------
    best : the best trial of each position; positions in which no trial has a score are missing.
    """

    search: Search
    scores: Sequence[Score]
    best: Mapping[Position, Score]

    def configured(self, cells: Sequence[StudyCell]) -> list[StudyCell]:
        """Return the cells of positions with a best trial, with its settings."""
        return [
            replace(cell, experiment=configured(cell.experiment, self.best[cell.position].trial.values))
            for cell in cells
            if cell.position in self.best
        ]

    def rows(self) -> list[dict[str, Any]]:
        """Return a dict for each trial: its position, number, values, score, CPU seconds, and whether it was chosen."""
        rows: list[dict[str, Any]] = []
        for score in self.scores:
            trial = score.trial
            row: dict[str, Any] = dict(zip(("method", "down", "across"), trial.position, strict=True))
            row["trial"] = trial.number
            row["values"] = {key: in_words(value) for key, value in trial.values.items()}
            row["score"] = score.value
            row["chosen"] = self.best.get(trial.position) is score
            row["cpu_seconds"] = cpu_seconds(cell.folder for cell in trial.cells)
            rows.append(row)
        return rows

    def rows_without_choice(self) -> list[str]:
        """Return a sentence for each position in which no trial has a score."""
        positions = dict.fromkeys(score.trial.position for score in self.scores)
        return [f"{_name(position)}: no trial has a score." for position in positions if position not in self.best]

    def sentences(self) -> list[str]:
        """Say what was searched, what was chosen in each row, and which trials failed."""
        search = self.search
        methods = dict.fromkeys(score.trial.position[0] for score in self.scores)
        value = search.value or "the primary metric"
        chosen_round = "the last round" if search.choose == "last" else "the round that these data choose"
        lines = [
            f"Each method has {counted(search.trials, 'trial')}, drawn at random with seed {search.seed}: "
            f"{_spaces_in_words(search, methods)}.",
            f"A trial is trained with {counted(search.seeds, 'seed')} and evaluated on validation data alone. The one "
            f"that is best by {value} in {chosen_round} sets the row's settings; these alone see test data.",
        ]

        for position, best in self.best.items():
            values = ", ".join(f"{key}={in_words(value)}" for key, value in best.trial.values.items())
            values_of_others = [
                score.value
                for score in self.scores
                if score.trial.position == position and score is not best and score.value is not None
            ]
            reached = f"{best.value:.2f} on validation data"
            if len(values_of_others) == 1:
                reached += f", the other {values_of_others[0]:.2f}"
            elif values_of_others:
                reached += f", the others {min(values_of_others):.2f} to {max(values_of_others):.2f}"
            lines.append(f"{_name(position)}: {values} (trial {best.trial.number}; {reached}).")

        for score in self.scores:
            if score.value is None:
                reason = score.error or "it has no such number."
                lines.append(f"{_name(score.trial.position)}, trial {score.trial.number}, has no score: {reason}")
        return lines


def judge(study: Study, trials: Sequence[SearchTrial], outcomes: Sequence[RunOutcome]) -> SearchOutcome:
    """Score finished and failed trials by validation data, and choose the best of each row, the first of equal ones.

    Parameters
    ----------
    outcomes : an outcome for each run of each trial, in their order.
    """
    search = study.search
    assert search is not None
    remaining = iter(outcomes)
    scores = []
    best: dict[Position, Score] = {}
    for trial in trials:
        score, lower_is_better = _score(search, trial, [next(remaining) for _ in trial.cells])
        scores.append(score)
        if score.value is None:
            continue
        leader = best.get(trial.position)
        sign = -1 if lower_is_better else 1
        if leader is None or leader.value is None or sign * score.value > sign * leader.value:
            best[trial.position] = score
    return SearchOutcome(search, scores, best)


def write_trials(folder: Path, searched: SearchOutcome) -> None:
    """Write the search's description, and a CSV file with a row for each trial and a column for each setting."""
    rows = []
    for row in searched.rows():
        values = row.pop("values")
        rows.append(row | values)
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / SEARCH, as_yaml(searched.search.model_dump()))
    write(folder / TRIALS, csv_text(rows))


def _score(search: Search, trial: SearchTrial, outcomes: Sequence[RunOutcome]) -> tuple[Score, bool]:
    """Return a trial's score, and whether lower ones are better."""
    for outcome in outcomes:
        if outcome.status == FAILED:
            return Score(trial, None, str(outcome.error)), False

    results = [RunResult.load(cell.folder) for cell in trial.cells]
    measures = results[0].experiment.measures
    values = [value for value in measured(results, search.metric) if math.isfinite(value)]
    mean = fmean(values) if len(values) == len(results) else None
    return Score(trial, mean), measures.lower_is_better(search.value or measures.primary.name)


def _spaces_in_words(search: Search, methods: Iterable[str]) -> str:
    """Say which settings are searched, in all methods and in some of these."""
    parts = [_listed(search.shared)]
    for label in methods:
        if search.methods.get(label):
            parts.append(f"for {label} also {_listed(search.methods[label])}")
    return ", ".join(parts)


def _listed(spaces: Mapping[str, Any]) -> str:
    texts = []
    for key, space in spaces.items():
        ((kind, values),) = space.items()
        texts.append(f"{key} ({kind} {values})")
    return " and ".join(texts)


def _name(position: Position) -> str:
    return " · ".join(filter(None, position))
