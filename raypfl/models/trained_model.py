"""A trained network that takes raw inputs."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class TrainedModel(nn.Module):
    """A network with the normalisation that it was trained with: ``images[n, C, H, W] -> logits[n, classes]``.

    Images have the values of the data set, in any dtype: usually pixels from 0 to 255; 0 to 16 for digits.

    Parameters
    ----------
    gain, offset : ``[C, 1, 1]``, or ``[features]``; the network sees ``images * gain + offset``.
    discrete : whether inputs are tokens, which are not normalised.

    Attributes
    ----------
    network : the network without normalisation.
    """

    gain: Tensor
    offset: Tensor

    def __init__(self, network: nn.Module, gain: Tensor, offset: Tensor, discrete: bool = False):
        super().__init__()
        self.network = network
        self.discrete = discrete
        self.register_buffer("gain", gain)
        self.register_buffer("offset", offset)
        self.train(network.training)

    def forward(self, images: Tensor) -> Tensor:
        if self.discrete:
            return self.network(images)
        return self.network(torch.addcmul(self.offset, images.to(self.gain.dtype), self.gain))
