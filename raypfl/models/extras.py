"""What a loss or a predictor is given by name beside parameters and a batch.

An extra is a tensor or another model. One that is :class:`PerClient` has a row for each client of the group, of which a
loss sees its own client's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from raypfl.common.messages import PerClient, per_client, unmarked
from raypfl.models.flat import FlatModel
from raypfl.models.other import Other

Extras = Mapping[str, Any]


def rows_of(extras: Extras) -> dict[str, Tensor]:
    """The rows ``[K, ...]`` of those extras that differ from client to client."""
    tensors = {name: e.theta if isinstance(e, Other) else e for name, e in extras.items()}
    return {name: unmarked(t) for name, t in tensors.items() if isinstance(t, PerClient)}


def with_rows(extras: Extras, rows: Mapping[str, Tensor]) -> dict[str, Any]:
    """The extras with other `rows`, or with one client's row each."""
    return {
        **extras,
        **{n: replace(extras[n], theta=r) if isinstance(extras[n], Other) else r for n, r in rows.items()},
    }


def chosen(extras: Extras, index: Tensor | slice) -> dict[str, Any]:
    """The extras of the clients at ``index[k]``."""
    return with_rows(extras, {name: per_client(rows[index]) for name, rows in rows_of(extras).items()})


def of_client(extras: Extras, k: int) -> dict[str, Any]:
    """The k-th client's."""
    return with_rows(extras, {name: rows[k] for name, rows in rows_of(extras).items()})


def trimmed(model: FlatModel, extras: dict[str, Any]) -> dict[str, Any]:
    """One client's, with model vectors cut to their parameters: a loss deals with what is trained."""
    if not model.num_buffers:
        return extras
    return {
        name: model.parameters(e) if isinstance(e, Tensor) and e.dim() and e.shape[-1] == model.size else e
        for name, e in extras.items()
    }
