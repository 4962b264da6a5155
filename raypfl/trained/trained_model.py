"""A trained network that takes raw inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from raypfl.common.errors import DataError
from raypfl.learning.objectives import Objective


class TrainedModel(nn.Module):
    """A network with the normalisation that it was trained with: ``images[n, C, H, W] -> logits[n, classes]``.

    Images have the values of the data set, in any dtype: usually pixels from 0 to 255; 0 to 16 for digits. Of a
    regression, outputs are in the units of the data set's targets.

    Parameters
    ----------
    gain, offset : ``[C, 1, 1]``, or ``[features]``; the network sees ``images * gain + offset``.
    input_shape : the shape of one input in training; a network may take others too.
    discrete : whether inputs are tokens, which are not normalised.
    objective : the objective, which knows the units of outputs; None: outputs stay as they are.
    feature_names : names of the last axis of inputs, in order; None: features have no names.
    class_names : names of the outputs in order: of classes, labels, numbers or tokens; None: they have no names.
    vocabulary : the word of each token of the inputs, which are texts; None: they are none.

    Attributes
    ----------
    network : the network without normalisation, also of its outputs.

    Raises
    ------
    DataError : from a call, if the network fails with inputs of another shape.
    """

    gain: Tensor
    offset: Tensor

    def __init__(
        self,
        network: nn.Module,
        gain: Tensor,
        offset: Tensor,
        input_shape: Sequence[int],
        discrete: bool = False,
        objective: Objective | None = None,
        feature_names: list[str] | None = None,
        class_names: list[str] | None = None,
        vocabulary: list[str] | None = None,
    ):
        super().__init__()
        self.network = network
        self.input_shape = tuple(input_shape)
        self.discrete = discrete
        self.objective = objective
        self.feature_names = feature_names
        self.class_names = class_names
        self.vocabulary = vocabulary
        self.register_buffer("gain", gain)
        self.register_buffer("offset", offset)
        self.train(network.training)

    def forward(self, images: Tensor) -> Tensor:
        try:
            if self.discrete:
                outputs = self.network(images)
            else:
                outputs = self.network(torch.addcmul(self.offset, images.to(self.gain.dtype), self.gain))
        except RuntimeError as error:
            if tuple(images.shape[1:]) == self.input_shape:
                raise
            trained_shape = ", ".join(map(str, ("n", *self.input_shape)))
            raise DataError(
                f"The network was trained with inputs of shape [{trained_shape}], and fails with {list(images.shape)}: "
                f"{error}"
            ) from error
        return outputs if self.objective is None else self.objective.in_units(outputs)
