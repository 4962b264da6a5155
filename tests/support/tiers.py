"""Which tests `make test` leaves to CI: the marker `thorough`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import pytest

from raypfl.methods import METHODS

QUICK_METHODS = {
    "apfl",  # steps of its own
    "ditto",  # a personal model in a client's state
    "fedamp",  # a matrix of clients x clients
    "fedavg",
    "feddf",  # trains at the server
    "fednh",  # prototypes
    "fedper",  # a part of the model is personal
    "fedptr",  # learns images
    "ifca",  # a client chooses among several models
    "pefll",  # several exchanges a round
    "perada",  # adapters and distillation
    "scaffold",  # a second vector down and up
}
"""A method for each mechanism that methods use. What is tested of every method, `make test` tests of these."""

assert set(METHODS) >= QUICK_METHODS


def methods(names: Iterable[str]) -> list[Any]:
    """Return the names as parameters of a test, which is `thorough` for all but the `QUICK_METHODS`."""
    return with_quick(sorted(names), QUICK_METHODS)


_Value = TypeVar("_Value", str, int)


def with_quick(values: Iterable[_Value], quick: set[_Value]) -> list[Any]:
    """Return values as parameters of a test, which is `thorough` for all that are not `quick`."""
    parameters = []
    for value in values:
        marks = () if value in quick else (pytest.mark.thorough,)
        parameters.append(pytest.param(value, marks=marks))
    return parameters
