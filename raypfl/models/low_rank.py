"""A dense layer with a low-rank adapter beside it."""

from __future__ import annotations

from torch import Tensor, nn


class LowRank(nn.Linear):
    """``y = W x + b + B A x``, for the W and b of an existing layer; ``r (inputs + outputs)`` further parameters.

    It starts as that layer, since B is zero. W and b keep their names; the new tensors are ``adapter.0.weight``, which
    is A ``[r, inputs]``, and ``adapter.1.weight``, which is B ``[outputs, r]``.
    """

    def __init__(self, layer: nn.Linear, rank: int):
        # On the meta device, so that nothing is drawn for weights that are replaced at once.
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        self.weight = layer.weight
        self.bias = layer.bias

        down = nn.Linear(layer.in_features, rank, bias=False)
        up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(up.weight)
        self.adapter = nn.Sequential(down, up)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.adapter(x)
