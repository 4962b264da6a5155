"""Random numbers of a step, keyed by client and step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Draws:
    """Random numbers for an optimizer's step. They depend on the client and the step only.

    Attributes
    ----------
    keys : ``int64[...]``, one for each vector.
    like : ``[..., P]``; draws have its shape, device and dtype.
    """

    keys: Tensor
    like: Tensor

    def normal(self) -> Tensor:
        """Standard normal numbers, ``[..., P]``; every call returns the same ones."""
        rows = [self._row(key) for key in self.keys.reshape(-1).tolist()]
        return torch.stack(rows).reshape(self.like.shape)

    def _row(self, key: int) -> Tensor:
        generator = torch.Generator(self.like.device).manual_seed(key ^ 0x6E6F697365)
        return torch.randn(self.like.shape[-1], generator=generator, dtype=self.like.dtype, device=self.like.device)
