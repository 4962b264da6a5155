"""What keeps cuDNN, on a GPU, from moving or misreading views of a vector, and from calls that it refuses."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def keep_views(module: nn.Module, device: torch.device) -> None:
    """Let the tensors of a network on `device` be views of a vector."""
    for child in module.modules():
        if isinstance(child, nn.RNNBase):
            # It would give its weights memory of their own, where steps of the vector do not reach them.
            child.flatten_parameters = _leave_weights  # type: ignore[method-assign]
            # Copying them at every call is the price, of which torch warns.
            if device.type == "cuda":
                child.forward = partial(_recur, child)
        elif isinstance(child, _BatchNorm) and device.type == "cuda":
            child.forward = partial(_normalise, child)  # type: ignore[method-assign]


def _leave_weights() -> None: ...


def _recur(layer: nn.RNNBase, *inputs: Any, **options: Any) -> Any:
    """Call a recurrent layer, without cuDNN where it has no gradients, in evaluation mode, and under autocast.

    Under autocast, PyTorch rounds what cuDNN gets to fp16, also where bf16 is asked for, and gradients may be lost.
    """
    has_gradients = layer.training or not torch.is_grad_enabled()
    return _call(layer, has_gradients and not torch.is_autocast_enabled("cuda"), *inputs, **options)


def _normalise(norm: _BatchNorm, x: Tensor) -> Tensor:
    """Call batch norm, without cuDNN if channels are last: cuDNN reads its tensors there in pieces of 16 aligned bytes.

    Channels are also last in a part of such a tensor's channels, which PyTorch copies to this layout for cuDNN.
    """
    channels_last = x.dim() > 3 and x.stride(1) <= x.stride(-1)
    return _call(norm, not channels_last, x)


def _call(layer: nn.Module, with_cudnn: bool, *inputs: Any, **options: Any) -> Any:
    usual = torch.backends.cudnn.enabled
    try:
        torch.backends.cudnn.enabled = usual and with_cudnn
        return type(layer).forward(layer, *inputs, **options)
    finally:
        torch.backends.cudnn.enabled = usual
