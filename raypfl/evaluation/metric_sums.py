"""Sums over test samples from which metrics are computed. Sums over the parts of a test set add up to the whole.

Metric sums have a row for each model, ``float64[K, W]``: the number of samples and the sums of each metric. If they are
kept by class, the number of samples and the sum of each `SampleMean` follow for every class.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from raypfl.common.errors import MethodError
from raypfl.evaluation.measures import Measures
from raypfl.learning.inference import ModelOutputs
from raypfl.learning.objectives import BinnedSums, Metric, OverAll, SampleMean, SampleSums, Scores
from raypfl.learning.objectives.base import unrounded


@dataclass(frozen=True)
class MetricSums:
    """The layout of a row of sums.

    Attributes
    ----------
    by_class : keep them by class too. Every sample must have exactly one class.
    """

    measures: Measures
    by_class: bool = False

    @cached_property
    def spans(self) -> dict[str, slice]:
        """The columns of each metric's sums."""
        spans, first = {}, 1
        for metric in (*self._dense, *self._sparse):
            last = first + metric.width(self.measures.targets)
            spans[metric.name], first = slice(first, last), last
        return spans

    @cached_property
    def _dense(self) -> list[SampleMean | SampleSums]:
        """Metrics whose sums get a term from every sample; their columns come first."""
        return [m for m in self.measures.metrics.values() if isinstance(m, SampleMean | SampleSums)]

    @cached_property
    def _sparse(self) -> list[Metric]:
        return [m for m in self.measures.metrics.values() if not isinstance(m, SampleMean | SampleSums)]

    @cached_property
    def means(self) -> list[str]:
        """The metrics that can be weighted by class."""
        return [name for name, metric in self.measures.metrics.items() if isinstance(metric, SampleMean)]

    @property
    def whole(self) -> bool:
        """Whether a metric needs all outputs at once, so that the sums of parts do not add up."""
        return any(isinstance(metric, OverAll) for metric in self.measures.metrics.values())

    @property
    def _plain_width(self) -> int:
        return max((span.stop for span in self.spans.values()), default=1)

    def empty(self, rows: int, device: torch.device | str = "cpu") -> Tensor:
        """Sums over no samples."""
        width = self._plain_width + self.by_class * (1 + len(self.means)) * self.measures.targets
        return torch.zeros(rows, width, dtype=torch.float64, device=device)

    def of(self, answers: Iterable[ModelOutputs], rows: int) -> Tensor:
        """The sums ``float64[rows, W]`` over all answers, on the CPU: a row for each model, or owner of the samples."""
        running = RunningSums(self, rows)
        for part in answers:
            running.add(part)
        return running.total()

    def values(self, sums: Tensor) -> Tensor:
        """The columns of `Measures`, ``float64[..., columns]``, from sums ``[..., W]``; NaN where there is no value."""
        count = sums[..., 0]
        known = {
            name: metric.value(sums[..., self.spans[name]], count) for name, metric in self.measures.metrics.items()
        }
        return self._in_columns({"samples": count, **known})

    def class_weighted(self, sums: Tensor, alpha: Tensor) -> Tensor:
        """The same columns with weight ``alpha[..., c]`` for samples of class c, from sums by class ``[..., W]``.

        `samples` counts those with a weight above 0 (Dai et al. 2023, acc_i of section 5).
        """
        count, *parts = sums[..., self._plain_width :].unflatten(-1, (1 + len(self.means), -1)).unbind(-2)
        total = (alpha * count).sum(-1)
        known = {name: (alpha * part).sum(-1) / total for name, part in zip(self.means, parts, strict=True)}
        return self._in_columns({"samples": (count * (alpha > 0)).sum(-1), **known})

    def _in_columns(self, known: dict[str, Tensor]) -> Tensor:
        unknown = torch.full_like(known["samples"], torch.nan)
        return torch.stack([known.get(name, unknown) for name in self.measures.columns], dim=-1)

    def add_part(self, sums: Tensor, part: ModelOutputs) -> None:
        """Add the terms of a batch's samples to all sums but those of metrics that need all outputs at once."""
        outputs = unrounded(part.outputs)
        y = part.y.expand(len(outputs), *part.y.shape[1:])
        scores = self.measures.objective.scores(outputs, y)
        dense = [row for metric in self._dense for row in _summed(metric, scores, self.measures.targets)]
        binned = [(m, *m.binned(scores)) for m in self._sparse if isinstance(m, BinnedSums)]
        values = [outputs.new_ones(outputs.shape[:2]), *dense, *(added for *_, added in binned)]
        kind = torch.float64 if any(v.dtype == torch.float64 for v in values) else outputs.dtype
        rows = torch.stack([v.to(kind) for v in values])
        rows = (rows if part.weight is None else rows * part.weight).double()
        mine, whole = sums[part.models], 1 + len(dense)
        _add(mine, part.owners, rows[:whole])
        for (metric, bins, _), row in zip(binned, rows[whole:], strict=True):
            _add_at(mine, part.owners, bins + self.spans[metric.name].start, row)
        if self.by_class:
            kept = [0, *(self.spans[name].start for name in self.means)]
            for i, row in enumerate(rows[kept]):
                _add_at(mine, part.owners, y + (self._plain_width + i * self.measures.targets), row)

    def add_whole(self, sums: Tensor, parts: list[ModelOutputs]) -> None:
        """Add the values of metrics that need all outputs at once; `parts` are all batches."""
        every = range(len(sums))
        for k in every:
            chosen = [_of(k, part) for part in parts if k in every[part.models]]
            if not sum(len(outputs) for outputs, _ in chosen):
                continue
            outputs, targets = (torch.cat(tensors) for tensors in zip(*chosen, strict=True))
            for metric in self._sparse:
                if isinstance(metric, OverAll):
                    sums[k, self.spans[metric.name]] = metric.of_all(outputs, targets) * sums[k, 0]


class RunningSums:
    """Metric sums over answers that come batch by batch.

    Parameters
    ----------
    rows : a row for each model, or owner of the samples.
    """

    def __init__(self, layout: MetricSums, rows: int):
        self.layout = layout
        self.rows = rows
        self._sums: Tensor | None = None
        self._parts: list[ModelOutputs] = []

    def add(self, part: ModelOutputs) -> None:
        """Add a batch."""
        if self._sums is None:
            self._sums = self.layout.empty(self.rows, part.outputs.device)
        self.layout.add_part(self._sums, part)
        if self.layout.whole:
            self._parts.append(part)

    def total(self) -> Tensor:
        """The sums ``float64[rows, W]``, on the CPU; asked for once, after the last batch."""
        if self._sums is None:
            return self.layout.empty(self.rows)
        if self._parts:
            self.layout.add_whole(self._sums, self._parts)
        return self._sums.cpu()


def _summed(metric: SampleMean | SampleSums, scores: Scores, targets: int) -> list[Tensor]:
    """The terms of a metric's sums for each sample, ``[k, b]`` each."""
    shape, mean = list(scores.outputs.shape[:2]), isinstance(metric, SampleMean)
    try:
        rows = metric.each(scores) if isinstance(metric, SampleMean) else metric.sums(scores)
    except AttributeError as error:
        if error.obj is not scores:
            raise
        raise MethodError(
            f"The metric {metric.name!r} needs scores.{error.name}, which the objective "
            f"{type(scores.objective).__name__} does not have; it belongs to another objective."
        ) from error
    says, wanted = ("each", shape) if mean else ("sums", [*shape, metric.width(targets)])
    if list(rows.shape) != wanted:
        raise MethodError(
            f"The metric {metric.name!r} returned {list(rows.shape)} for {shape[0]} models and {shape[1]} samples; its "
            f"{says}(scores) must return {wanted}, numbers for each sample of each model."
        )
    return [rows] if mean else list(rows.unbind(-1))


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


def _of(k: int, part: ModelOutputs) -> tuple[Tensor, Tensor]:
    """Outputs and targets of row k, ``[n, ...]``."""
    row = 0 if part.owners is not None else k - part.models.start
    outputs, y = unrounded(part.outputs[row]), part.y.expand(len(part.outputs), *part.y.shape[1:])[row]
    if part.owners is not None:
        real = part.owners == k
    elif part.weight is not None:
        real = part.weight[row] > 0
    else:
        return outputs, y
    return outputs[real], y[real]
