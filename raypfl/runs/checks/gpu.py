"""What is said of a GPU that is too small, or fails, before a run begins."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from raypfl.clients.gpu_errors import gpu_failure, out_of_memory
from raypfl.common.errors import OutOfMemory, RaypflError
from raypfl.engine.method_errors import advice_of_failed_gpu


@contextlib.contextmanager
def gpu_errors_explained() -> Iterator[None]:
    """Say what to do about a GPU's error in the preparation of a run.

    Raises
    ------
    OutOfMemory, RaypflError : in place of errors that a GPU has caused, which would else seem to be the network's.
    """
    try:
        yield
    except Exception as error:
        failure = gpu_failure()
        if failure:
            raise RaypflError(
                f"Before the run began, the GPU failed: {failure}. {advice_of_failed_gpu(failure)}"
            ) from error
        for cause in (error, error.__cause__):
            if out_of_memory(cause):
                raise OutOfMemory(
                    "The GPU's memory is too small for what is tried before a run, a few steps and an evaluation of "
                    "few clients, or other programs fill it (nvidia-smi names them). Lower training.batch_size, "
                    f"evaluation.batch_size or engine.group_size. {str(cause).splitlines()[0]}"
                ) from error
        raise
