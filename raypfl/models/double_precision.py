"""A check that a method whose models have double precision computes nothing in single precision."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from raypfl.common.errors import MethodError
from raypfl.common.operation_mode import OperationMode


def refuse_mixed_precision(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """While active, an operation on numbers of single and of double precision is an error, if models have double.

    PyTorch would convert the single ones, such as those of ``torch.zeros(3)``, and say nothing: the result has the
    right type and seven wrong digits.

    Parameters
    ----------
    dtype : that of the models.
    """
    return _RefuseMixedPrecision() if dtype == torch.float64 else nullcontext()


class _RefuseMixedPrecision(OperationMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        dtypes = set(_dtypes(args))
        if kwargs:
            dtypes.update(_dtypes(kwargs.values()))

        operation = func.__name__.partition(".")[0]
        # Numbers that are written into a tensor of single precision do not look like double ones.
        is_conversion = operation == "_to_copy" or (operation == "copy_" and args[0].dtype == torch.float32)
        if torch.float32 in dtypes and torch.float64 in dtypes and not is_conversion:
            raise MethodError(
                f"{operation.strip('_')} got a tensor of torch.float32 and one of torch.float64, so its result would "
                "only look as precise as training.precision=fp64. Make tensors like the models: theta.new_zeros(3), "
                "torch.zeros_like(theta), share * flags.to(theta)."
            )
        return func(*args, **(kwargs or {}))


def _dtypes(arguments: Iterable[Any]) -> Iterator[torch.dtype]:
    """Yield the types of the tensors among an operation's arguments, and in lists of them."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument.dtype
        elif isinstance(argument, list | tuple):
            yield from _dtypes(argument)
