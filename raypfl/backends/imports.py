"""How a process imports much at once."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Within: Python's garbage collector rests, and what there is at the end it leaves alone for good.

    Modules are no garbage, but torch's alone are 200,000 objects, and going through them again and again while more are
    imported takes a seventh of the time.
    """
    resumes = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if resumes:
            gc.enable()
