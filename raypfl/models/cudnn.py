"""What keeps cuDNN, on a GPU, from moving or misreading tensors that are views of a vector."""

import warnings
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def keep_views(module: nn.Module, device: torch.device) -> None:
    """Let the tensors of a network on `device` be views of a vector."""
    for child in module.modules():
        if isinstance(child, nn.RNNBase):
            # It would give its weights memory of their own, where steps of the vector do not reach them.
            child.flatten_parameters = _leave_weights  # type: ignore[method-assign]
            # Copying them at every call is the price.
            warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
        elif isinstance(child, _BatchNorm) and device.type == "cuda":
            child.forward = partial(_normalise, child)  # type: ignore[method-assign]


def _leave_weights() -> None: ...


def _normalise(norm: _BatchNorm, x: Tensor) -> Tensor:
    """Batch norm without cuDNN if channels are last: cuDNN reads its tensors there in pieces of 16 aligned bytes."""
    usual = torch.backends.cudnn.enabled
    channels_last = x.dim() == 4 and (x.stride(1), x.stride(3)) == (1, x.shape[1])
    try:
        torch.backends.cudnn.enabled = usual and not channels_last
        return type(norm).forward(norm, x)
    finally:
        torch.backends.cudnn.enabled = usual
