"""Collect the warnings of a function that runs while other threads work."""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NOT_THE_USERS = (
    "RNN module weights are not part of single contiguous chunk",
    "Attempting to run cuBLAS, but there was no current CUDA context",
)
"""How torch's warnings of a GPU begin that follow from how raypfl calls it, and that a user can do nothing about."""

_NO_RULE = re.compile(r"There is a performance drop because .* the batching rule for ([\w:.]+)\.")
"""A warning of torch.func, which goes on: "Please file us an issue on GitHub"."""


@contextmanager
def user_warnings() -> Iterator[set[str]]:
    """While active, collect the texts of this thread's UserWarnings, which are not shown.

    Python's own record has those of other threads as well: a thread imports MLflow, for example, and the warnings of
    its packages would seem to be the function's.
    """
    thread = threading.get_ident()
    texts: set[str] = set()

    def collect(message: Warning | str, category: type[Warning], *location: Any, **more: Any) -> None:
        if threading.get_ident() == thread:
            if issubclass(category, UserWarning) and not str(message).startswith(NOT_THE_USERS):
                texts.add(_in_our_words(str(message)))
        elif getattr(show_before, "collects", False):
            show_before(message, category, *location, **more)

    collect.collects = True  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        show_before: Any = warnings.showwarning
        warnings.showwarning = collect
        warnings.simplefilter("always", UserWarning)
        yield texts


def _in_our_words(text: str) -> str:
    without_rule = _NO_RULE.match(text)
    if without_rule is None:
        return text
    return (
        f"torch.func.vmap has no rule for {without_rule[1]} and computes it client by client: with the same results, "
        "but more slowly than what other functions of torch compute for all clients at once."
    )
