"""Personal models that are more than a vector each: a function of inputs, and each client's tensors for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from raypfl.common.errors import MethodError
from raypfl.common.messages import ReadOnly, one_client_at_a_time, per_client, unmarked
from raypfl.common.user_code import where_defined
from raypfl.models.extras import Other, of_client, of_clients, rows_of, with_rows


class Predictor:
    """A function that predicts for the clients of a group, for methods whose models are more than a vector each.

    ``personal_model`` and ``unseen_model`` may return one. The function sees one client at a time. Pass tensors that
    differ between clients by name; do not close over them.

    Parameters
    ----------
    function : ``function(x[b, ...], **extras) -> outputs[b, ...]`` of one client; outputs are like the network's
        (logits). Networks are in evaluation mode.
    extras : tensors and other models (``clients.other(theta)``), as for a loss. An extra with one row for each client
        (a state, a training result, ``raypfl.per_client(rows)``) is passed row by row; other extras are the same for
        all clients. If rows differ in length (a memory of each client's samples), pad them as ``clients.map`` does, and
        pass ``batch.weight``, mapped in the same way, which is 0 for padding.

    Raises
    ------
    MethodError : if no extra has one row for each client, or numbers of rows differ.

    Examples
    --------
    ``Predictor(lambda x, own, bias: own(x) + bias, own=clients.other(theta), bias=clients.state["bias"])``
    """

    def __init__(self, function: Callable[..., Tensor], **extras: Any):
        self.function = function
        self.extras = {name: _writable(extra) for name, extra in extras.items()}

        counts = {name: len(rows) for name, rows in self.rows.items()}
        if len(set(counts.values())) != 1:
            raise MethodError(
                f"The Predictor of {where_defined(function)} needs extras with one row for each client of "
                f"the group; those marked so are {counts or 'none'}. Mark one with raypfl.per_client(rows)."
            )

    @property
    def rows(self) -> dict[str, Tensor]:
        """The extras that differ between clients, by name: ``[K, ...]`` each."""
        return rows_of(self.extras)

    def __len__(self) -> int:
        """Return the number of clients."""
        return len(next(iter(self.rows.values())))

    def __getitem__(self, clients: slice) -> Predictor:
        return Predictor(self.function, **of_clients(self.extras, clients))

    def outputs(self, x: Tensor, client_rows: Mapping[str, Tensor]) -> Tensor:
        """Return one client's outputs ``[b, ...]`` for ``x[b, ...]``, given its row of each entry in `rows`."""
        with one_client_at_a_time():
            outputs = self.function(x, **with_rows(self.extras, client_rows))
        if outputs.dim() == 0 or len(outputs) != len(x):
            raise MethodError(
                f"{where_defined(self.function)} returned {list(outputs.shape)} for {len(x)} samples; a Predictor's "
                "function must return a row for each sample."
            )
        return outputs

    def outputs_of(self, k: int, x: Tensor) -> Tensor:
        """Return the k-th client's outputs ``[b, ...]`` for ``x[b, ...]``."""
        return self.outputs(x, {name: rows[k] for name, rows in self.rows.items()})

    def as_module(self, k: int, evaluating: Callable[[], contextlib.AbstractContextManager[Any]]) -> nn.Module:
        """Return the k-th client's predictor as an ordinary module, whose forward runs inside ``evaluating()``."""
        return _ClientModule(self, k, evaluating)


class _ClientModule(nn.Module):
    def __init__(self, predictor: Predictor, k: int, evaluating: Callable[[], contextlib.AbstractContextManager[Any]]):
        super().__init__()
        self.predictor = predictor
        self.evaluating = evaluating
        for name, extra in of_client(predictor.extras, k).items():
            tensor = extra.theta if isinstance(extra, Other) else extra
            if isinstance(tensor, Tensor):
                self.register_buffer(name, tensor.clone())
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        with self.evaluating():
            return self.predictor.outputs(x, dict(self.named_buffers()))


def _writable(extra: Any) -> Any:
    """Copy a read-only state, since the function may change it in place."""
    return per_client(unmarked(extra).clone()) if isinstance(extra, ReadOnly) else extra
