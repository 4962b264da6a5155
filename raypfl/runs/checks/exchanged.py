"""Whether a method suits clients whose networks have different architectures."""

from __future__ import annotations

from collections.abc import Sequence

from raypfl.common.errors import ConfigError, RaypflError
from raypfl.engine.prepared import Prepared
from raypfl.methods import METHODS, Method
from raypfl.models import FlatModel


def refuse_exchanged(prepared: Prepared) -> None:
    """Raise a ConfigError if a method exchanges what clients with different architectures do not have in common."""
    if prepared.architecture_of is None:
        return

    method = prepared.experiment.method
    unshared = _unshared_segments(method, prepared.architectures)
    if unshared:
        raise ConfigError(
            f"method is {METHODS.name_of(type(method))!r}, which exchanges parts of clients' networks such as "
            f"{unshared[0]!r}, but model is heterogeneous: its networks have only the output layer in common. Methods "
            f"that exchange only that: {', '.join(_fitting(prepared.architectures))}."
        )

    try:
        method.check(prepared.task.model)
    except ConfigError as error:
        raise ConfigError(
            f"model is heterogeneous, so the server has only the output layer. {error} Select parts that all "
            "networks have: 'feature extractor' and 'output layer'."
        ) from error


def _unshared_segments(method: Method, architectures: Sequence[FlatModel]) -> list[str]:
    """Return the names of the segments that a method exchanges although each architecture has its own."""
    names = []
    for model in architectures:
        exchanged = method.exchanged(model) & ~model.mask("output layer")
        for name, segment in model.segments.items():
            if exchanged[segment.start : segment.stop].any():
                names.append(name)
    return names


def _fitting(architectures: Sequence[FlatModel]) -> list[str]:
    """Return the methods that, at their defaults, exchange at most the output layer."""
    fitting = []
    for name in METHODS:
        try:
            if not _unshared_segments(METHODS.get(name)(), architectures):
                fitting.append(name)
        except (RaypflError, TypeError):
            # A method of an installed package may lack functions, or need another network.
            continue
    return fitting
