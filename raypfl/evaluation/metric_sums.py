"""Sums over test samples from which metrics are computed. Sums over the parts of a test set add up to the whole.

Metric sums have a row for each model, ``float64[K, W]``: the number of samples and the sums of each metric. Sums by
class follow if they are asked for: for every class, the number of samples and the sum of each `SampleMean`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from raypfl.common.errors import EvaluationError
from raypfl.evaluation.inference import ModelOutputs
from raypfl.evaluation.run_metrics import Measures
from raypfl.learning.objectives import BinnedSums, Metric, OverAll, SampleMean, SampleSums, Scores
from raypfl.learning.objectives.base import unrounded


@dataclass(frozen=True)
class MetricSums:
    """The layout of a row of sums.

    `by_class` : whether to sum by class too; every sample must then have exactly one class.
    """

    measures: Measures
    by_class: bool = False

    @cached_property
    def spans(self) -> dict[str, slice]:
        """The columns of each metric's sums."""
        spans = {}
        start = 1
        for metric in (*self._dense, *self._sparse):
            stop = start + metric.width(self.measures.targets)
            spans[metric.name] = slice(start, stop)
            start = stop
        return spans

    @cached_property
    def _dense(self) -> list[SampleMean | SampleSums]:
        """Metrics whose sums get a term from every sample; their columns come first."""
        return [metric for metric in self.measures.metrics.values() if isinstance(metric, SampleMean | SampleSums)]

    @cached_property
    def _sparse(self) -> list[Metric]:
        return [metric for metric in self.measures.metrics.values() if not isinstance(metric, SampleMean | SampleSums)]

    @cached_property
    def means(self) -> list[str]:
        """The names of the metrics that can be weighted by class."""
        return [name for name, metric in self.measures.metrics.items() if isinstance(metric, SampleMean)]

    @property
    def needs_all_outputs(self) -> bool:
        """Whether a metric needs all outputs at once, so that the sums of parts do not add up."""
        return any(isinstance(metric, OverAll) for metric in self.measures.metrics.values())

    @property
    def _plain_width(self) -> int:
        return max((span.stop for span in self.spans.values()), default=1)

    def empty(self, rows: int, device: torch.device | str = "cpu") -> Tensor:
        """Return sums over no samples, ``float64[rows, W]``."""
        width = self._plain_width
        if self.by_class:
            width += (1 + len(self.means)) * self.measures.targets
        return torch.zeros(rows, width, dtype=torch.float64, device=device)

    def accumulate(self, batches: Iterable[ModelOutputs], rows: int) -> Tensor:
        """Return the sums ``float64[rows, W]`` over all batches, on the CPU, with a row for each model or owner."""
        running = RunningSums(self, rows)
        for batch in batches:
            running.add(batch)
        return running.total()

    def values(self, sums: Tensor) -> Tensor:
        """Return the columns of `Measures`, ``float64[..., columns]``, from sums ``[..., W]``; NaN: no value."""
        count = sums[..., 0]
        values = {"samples": count}
        for name, metric in self.measures.metrics.items():
            values[name] = metric.value(sums[..., self.spans[name]], count)
        return self._in_columns(values)

    def class_weighted(self, sums: Tensor, alpha: Tensor) -> Tensor:
        """Return the columns with weight ``alpha[..., c]`` for samples of class c, from sums by class ``[..., W]``.

        `samples` counts those with a weight above 0 (Dai et al. 2023, acc_i of section 5).
        """
        by_class = sums[..., self._plain_width :].unflatten(-1, (1 + len(self.means), -1))
        count, *metric_sums = by_class.unbind(-2)
        total = (alpha * count).sum(-1)
        values = {"samples": (count * (alpha > 0)).sum(-1)}
        for name, class_sums in zip(self.means, metric_sums, strict=True):
            values[name] = (alpha * class_sums).sum(-1) / total
        return self._in_columns(values)

    def _in_columns(self, values: dict[str, Tensor]) -> Tensor:
        no_value = torch.full_like(values["samples"], torch.nan)
        return torch.stack([values.get(name, no_value) for name in self.measures.columns], dim=-1)

    def add_batch(self, sums: Tensor, batch: ModelOutputs) -> None:
        """Add the terms of a batch's samples to all sums but those of metrics that need all outputs at once."""
        outputs = unrounded(batch.outputs)
        y = batch.y.expand(len(outputs), *batch.y.shape[1:])
        scores = self.measures.objective.scores(outputs, y)

        dense: list[Tensor] = []
        for metric in self._dense:
            dense += _dense_terms(metric, scores, self.measures.targets)
        binned: list[tuple[BinnedSums, Tensor, Tensor]] = []
        for sparse_metric in self._sparse:
            if isinstance(sparse_metric, BinnedSums):
                with _refused_by_another_objective(sparse_metric, scores):
                    binned.append((sparse_metric, *sparse_metric.binned(scores)))
        terms = [outputs.new_ones(outputs.shape[:2]), *dense, *(term for _, _, term in binned)]

        # One product with the weights and one conversion to float64 for the terms of all metrics.
        in_double = any(term.dtype == torch.float64 for term in terms)
        dtype = torch.float64 if in_double else outputs.dtype
        rows = torch.stack([term.to(dtype) for term in terms])
        rows = (rows if batch.weight is None else rows * batch.weight).double()

        batch_sums = sums[batch.models]
        num_dense = 1 + len(dense)
        _add(batch_sums, batch.owners, rows[:num_dense])
        for (binned_metric, bins, _), row in zip(binned, rows[num_dense:], strict=True):
            _add_at(batch_sums, batch.owners, bins + self.spans[binned_metric.name].start, row)

        if self.by_class:
            columns = [0, *(self.spans[name].start for name in self.means)]
            for i, row in enumerate(rows[columns]):
                _add_at(batch_sums, batch.owners, y + (self._plain_width + i * self.measures.targets), row)

    def add_overall(self, sums: Tensor, batches: list[ModelOutputs]) -> None:
        """Add the values of metrics that need all outputs at once."""
        rows = range(len(sums))
        for k in rows:
            outputs_of_row = []
            targets_of_row = []
            for batch in batches:
                if k in rows[batch.models]:
                    batch_outputs, batch_targets = _row_of(k, batch)
                    outputs_of_row.append(batch_outputs)
                    targets_of_row.append(batch_targets)
            if not any(len(batch_outputs) for batch_outputs in outputs_of_row):
                continue

            outputs = self.measures.objective.in_units(torch.cat(outputs_of_row))
            targets = torch.cat(targets_of_row)
            for metric in self._sparse:
                if isinstance(metric, OverAll):
                    sums[k, self.spans[metric.name]] = metric.of_all(outputs, targets) * sums[k, 0]


class RunningSums:
    """Metric sums over outputs that come batch by batch.

    `rows` : the number of rows: one for each model, or for each owner of samples.
    """

    def __init__(self, layout: MetricSums, rows: int):
        self.layout = layout
        self.rows = rows
        self._sums: Tensor | None = None
        self._batches: list[ModelOutputs] = []

    def add(self, batch: ModelOutputs) -> None:
        """Add a batch."""
        if self._sums is None:
            self._sums = self.layout.empty(self.rows, batch.outputs.device)
        self.layout.add_batch(self._sums, batch)
        if self.layout.needs_all_outputs:
            self._batches.append(batch)

    def total(self) -> Tensor:
        """Return the sums ``float64[rows, W]``, on the CPU; call it once, after the last batch."""
        if self._sums is None:
            return self.layout.empty(self.rows)
        if self._batches:
            self.layout.add_overall(self._sums, self._batches)
        return self._sums.cpu()


def _dense_terms(metric: SampleMean | SampleSums, scores: Scores, targets: int) -> list[Tensor]:
    """Return the terms of a metric's sums for each sample, ``[k, b]`` each."""
    is_mean = isinstance(metric, SampleMean)
    with _refused_by_another_objective(metric, scores):
        rows: Any = metric.each(scores) if isinstance(metric, SampleMean) else metric.sums(scores)

    shape = list(scores.outputs.shape[:2])
    function = "each" if is_mean else "sums"
    expected = shape if is_mean else [*shape, metric.width(targets)]
    if not isinstance(rows, Tensor) or list(rows.shape) != expected:
        returned = list(rows.shape) if isinstance(rows, Tensor) else f"a {type(rows).__name__}"
        raise EvaluationError(
            f"The metric {metric.name!r} returned {returned} for {shape[0]} models and {shape[1]} samples; its "
            f"{function}(scores) must return {expected}, numbers for each sample of each model."
        )
    return [rows] if is_mean else list(rows.unbind(-1))


@contextlib.contextmanager
def _refused_by_another_objective(metric: Metric, scores: Scores) -> Iterator[None]:
    """While active, a metric that reads what the objective's scores lack raises an EvaluationError."""
    try:
        yield
    except AttributeError as error:
        if error.obj is not scores:
            raise
        raise EvaluationError(
            f"The metric {metric.name!r} needs scores.{error.name}, which the objective "
            f"{type(scores.objective).__name__} does not have; it belongs to another objective. Leave it out of "
            "evaluation.metrics."
        ) from error


def _add(sums: Tensor, owners: Tensor | None, values: Tensor) -> None:
    """Add ``values[n, k, b]`` to the first n columns."""
    if owners is None:
        sums[:, : len(values)] += values.sum(-1).T
    else:
        sums[:, : len(values)].index_add_(0, owners, values[:, 0].T)


def _add_at(sums: Tensor, owners: Tensor | None, columns: Tensor, values: Tensor) -> None:
    """Add ``values[k, b]`` to the columns ``columns[k, b]``."""
    if owners is None:
        sums.scatter_add_(1, columns, values)
    else:
        sums.index_put_((owners, columns[0]), values[0], accumulate=True)


def _row_of(k: int, batch: ModelOutputs) -> tuple[Tensor, Tensor]:
    """Return outputs and targets of row k, ``[n, ...]``."""
    row = 0 if batch.owners is not None else k - batch.models.start
    outputs = unrounded(batch.outputs[row])
    y = batch.y.expand(len(batch.outputs), *batch.y.shape[1:])[row]

    if batch.owners is not None:
        selected = batch.owners == k
    elif batch.weight is not None:
        selected = batch.weight[row] > 0
    else:
        return outputs, y
    return outputs[selected], y[selected]
