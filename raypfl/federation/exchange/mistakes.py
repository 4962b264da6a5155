"""Tell mistakes in code, which another try would repeat, from passing failures of the machine."""

from __future__ import annotations

_MISTAKES = (
    TypeError,
    ValueError,
    NameError,
    AttributeError,
    LookupError,
    ArithmeticError,
    AssertionError,
    ImportError,
    NotImplementedError,
    RecursionError,
)

_PASSING = (
    "CUDA error",
    "CUBLAS_STATUS",
    "cuDNN error",
    "CUDNN_STATUS",
    "NCCL error",
    "allocate memory",
    "start new thread",
    "DataLoader worker",
)
"""Parts of the messages of RuntimeErrors whose cause is the machine; torch raises others for wrong shapes or types."""


def is_mistake(error: BaseException) -> bool:
    """Return whether an error is a mistake in the code: a TypeError, for example, or torch's error for wrong shapes."""
    if type(error) is RuntimeError:
        return not any(part in str(error) for part in _PASSING)
    return isinstance(error, _MISTAKES)
