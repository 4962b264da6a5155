"""The base class of modes that see PyTorch's operations."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class OperationMode(TorchDispatchMode):
    """A mode that sees operations on tensors, below vmap and autograd, without torch's compiler."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True, the default, imports the compiler with the first use in a process, which takes seconds.
        return False
