"""Random numbers of a step that are keyed by whose step it is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Draws:
    """What an optimizer may draw in a step: the same for a client and step, whichever clients are beside it.

    Attributes
    ----------
    keys : ``int64[...]``, one for each vector that steps.
    like : ``[..., P]``, of the device and type that draws have.
    """

    keys: Tensor
    like: Tensor

    def normal(self) -> Tensor:
        """Standard normal numbers, ``[..., P]``; called again, the same ones."""
        rows = [self._row(key) for key in self.keys.reshape(-1).tolist()]
        return torch.stack(rows).reshape(self.like.shape)

    def _row(self, key: int) -> Tensor:
        generator = torch.Generator(self.like.device).manual_seed(key ^ 0x6E6F697365)
        return torch.randn(self.like.shape[-1], generator=generator, dtype=self.like.dtype, device=self.like.device)
