"""Personal models that are more than a vector each: a function of inputs, and what each client has for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from raypfl.authors import place
from raypfl.errors import MethodError
from raypfl.messages import Lent, PerClient, one_client_at_a_time, per_client, plain


class Predictor:
    """What a group's clients predict with, where that is not the clients' network at a vector.

    ``personal_model`` and ``unseen_model`` may return one. The function sees one client: what differs from client to
    client is passed to it by name, never closed over.

    Parameters
    ----------
    function : ``function(x[b, ...], **tensors) -> outputs[b, ...]`` of one client, such as the network's (logits).
        Networks are in evaluation mode.
    tensors : those that have a row for each client (what came up per client, a state, ``raypfl.per_client(rows)``) are
        passed row by row, others as they are, to everybody. Clients of a group whose rows differ in length need
        padding, and something that tells it from the rest; ``clients.map`` pads so.

    Raises
    ------
    MethodError : if no tensor has a row for each client, or their numbers of rows differ.

    Examples
    --------
    ``Predictor(lambda x, theta, b: clients.model(theta, x) + b, theta=server["theta"], b=clients.state["bias"])``
    """

    def __init__(self, function: Callable[..., Tensor], **tensors: Tensor):
        self.function = function
        self.rows = {name: _own(t) for name, t in tensors.items() if isinstance(t, PerClient)}
        self.shared = {name: t for name, t in tensors.items() if name not in self.rows}
        counts = {name: len(rows) for name, rows in self.rows.items()}
        if len(set(counts.values())) != 1:
            raise MethodError(
                f"The Predictor of {place(function)} needs tensors with a row for each client of the group; marked as "
                f"such are {counts or 'none'}. raypfl.per_client(rows) marks one."
            )

    def __len__(self) -> int:
        """Clients."""
        return len(next(iter(self.rows.values())))

    def __getitem__(self, some: slice) -> Predictor:
        return Predictor(self.function, **self.shared, **{n: per_client(t[some]) for n, t in self.rows.items()})

    def of(self, k: int) -> dict[str, Tensor]:
        """What the k-th client's function is given."""
        return self.shared | {name: rows[k] for name, rows in self.rows.items()}

    def outputs(self, x: Tensor, mine: dict[str, Tensor]) -> Tensor:
        """One client's outputs ``[b, ...]`` for ``x[b, ...]``, given what :meth:`of` gave."""
        with one_client_at_a_time():
            outputs = self.function(x, **mine)
        if outputs.dim() == 0 or len(outputs) != len(x):
            raise MethodError(
                f"{place(self.function)} returned {list(outputs.shape)} for {len(x)} samples; a Predictor's function "
                "must return a row for each sample."
            )
        return outputs

    def as_module(self, k: int, evaluating: Callable[[], contextlib.AbstractContextManager[Any]]) -> nn.Module:
        """The k-th client's as an ordinary module, whose forward runs within ``evaluating()``."""
        return _Module(self, k, evaluating)


class _Module(nn.Module):
    def __init__(self, predictor: Predictor, k: int, evaluating: Callable[[], contextlib.AbstractContextManager[Any]]):
        super().__init__()
        self.predictor, self.evaluating = predictor, evaluating
        for name, tensor in predictor.of(k).items():
            self.register_buffer(name, tensor.clone())
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        with self.evaluating():
            return self.predictor.outputs(x, dict(self.named_buffers()))


def _own(rows: PerClient) -> Tensor:
    """Without the mark; a state that is lent is copied, for the function may change it."""
    return plain(rows).clone() if isinstance(rows, Lent) else plain(rows)
