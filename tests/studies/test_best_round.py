"""The round in which a metric is best, where a study's column takes its numbers from it."""

from __future__ import annotations

import math
from types import SimpleNamespace

from raypfl.studies.table import entries


def test_a_round_whose_metric_is_undefined_is_never_the_best(monkeypatch):
    values = {1: math.nan, 2: 0.3, 3: 0.5, 4: math.nan}
    monkeypatch.setattr(entries, "_rows_of_round", lambda result, metric, round: [{"auc": values[round]}])
    measures = SimpleNamespace(lower_is_better=lambda value: False)
    result = SimpleNamespace(experiment=SimpleNamespace(measures=measures))
    assert entries._best_round(result, SimpleNamespace(value="auc"), [1, 2, 3, 4]) == [3]
    assert entries._best_round(result, SimpleNamespace(value="auc"), [1, 4]) == []
