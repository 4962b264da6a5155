"""The rounds from which a study's column takes its numbers: the best one, or the last ones."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from raypfl.learning.objectives.base import Loss
from raypfl.studies.parts import MetricColumn
from raypfl.studies.table import entries
from tests.results.test_picture import made_up
from tests.support.studies import cells_of, study_of


def test_a_round_whose_metric_is_undefined_is_never_the_best(monkeypatch):
    values = {1: math.nan, 2: 0.3, 3: 0.5, 4: math.nan}
    monkeypatch.setattr(entries, "_rows_of_round", lambda result, metric, round: [{"auc": values[round]}])
    measures = SimpleNamespace(lower_is_better=lambda value: False)
    result = SimpleNamespace(experiment=SimpleNamespace(measures=measures))
    assert entries._best_round(result, SimpleNamespace(value="auc"), [1, 2, 3, 4]) == [3]
    assert entries._best_round(result, SimpleNamespace(value="auc"), [1, 4]) == []


def test_a_metric_that_is_a_sum_over_clients_is_not_ranked_by_their_mean(monkeypatch):
    column = MetricColumn(protocol="local", model="deployed", value="loss")
    study = study_of("digits-personal").model_copy(update={"metrics": {"loss": column}})
    cells = cells_of("digits-personal")
    first_of = {cell.method: i for i, cell in reversed([*enumerate(cells)])}
    results = {first_of["FedAvg"]: made_up("fedavg"), first_of["Ditto"]: made_up("ditto", ("personal",))}

    def ranked() -> set[str]:
        return {entry.method for entry in entries.table_entries(study, study, cells, results) if entry.standing}

    assert ranked() == {"FedAvg", "Ditto"}
    monkeypatch.setattr(Loss, "added", True)
    assert not ranked()


@pytest.mark.parametrize(
    ("column_last", "evaluation_last", "squares"),
    [(5, 1, [16, 25, 36, 49, 64]), (None, 1, [64]), (None, 3, [36, 49, 64]), (2, 3, [49, 64])],
)
def test_the_table_has_the_mean_of_the_last_rounds_of_its_column_or_else_of_the_runs(
    column_last, evaluation_last, squares
):
    study = study_of("fedptr-table7")
    columns = {name: column.model_copy(update={"last": column_last}) for name, column in study.metrics.items()}
    study = study.model_copy(update={"metrics": columns})
    cells = cells_of("fedptr-table7")
    experiment = cells[0].experiment.override([f"evaluation.last={evaluation_last}"])
    accuracy = {round: round**2 / 100 for round in range(1, 9)}

    def summary(round: int) -> list[dict]:
        return [{"protocol": "global", "model": "global", "accuracy": accuracy[round]}]

    # No client was tested, so that nothing is drawn from clients.
    columns = {"round": list(accuracy), "protocol": ["global"] * 8, "model": ["global"] * 8, "client": [0] * 8}
    table = pa.table(columns | {"samples": [0] * 8, "accuracy": list(accuracy.values())})
    result = SimpleNamespace(evaluations=table, experiment=experiment, summary=summary)
    by_method = {entry.method: entry for entry in entries.table_entries(study, study, cells, {0: result})}

    assert by_method["every 1"].values == pytest.approx([np.mean(squares)])
    assert by_method["every 1"].missing == 2 and by_method["every 4"].values == ()
