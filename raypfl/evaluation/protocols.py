"""Protocols, which define the samples on which models are evaluated; see ``docs/evaluation.md``."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from torch import Tensor

from raypfl.common.errors import ConfigError, did_you_mean
from raypfl.evaluation.corruptions import CORRUPTIONS, SEVERITIES, Corruption

if TYPE_CHECKING:
    from raypfl.data import ClientData
    from raypfl.learning.objectives import Objective

BACKDOOR = "backdoor"
"""The protocol on test samples with the trigger of an attack."""

OWN_SPLITS = {"local": "test", "val": "val", "train": "train", "unseen": "test", BACKDOOR: "test"}
"""Protocols on a client's own samples -> the split that each uses."""

WEIGHTED = ("pm_v", "pm_l")
"""Protocols on all clients' test data, with class weights from the client's training data."""

_FIXED = ("local", "global", "unseen", "val", *WEIGHTED, "train", BACKDOOR)
PROTOCOLS = (*_FIXED, "ood/POOL", "ood/corrupt/NAME", "ood/corrupt/NAME/SEVERITY")

_OOD = "ood/"
_CORRUPT = "ood/corrupt/"


class EvaluationSamples(NamedTuple):
    """The numbers of test samples, ``int64[n]``, and the corruption of their inputs."""

    indices: np.ndarray
    corruption: Corruption | None = None


def protocol_mistakes(protocols: Sequence[str]) -> list[str]:
    """Return a sentence for each mistake in the names of protocols."""
    if not protocols:
        return [f"evaluation.protocols is empty; it must name one or more of {', '.join(PROTOCOLS)}."]

    lines = []
    for name in dict.fromkeys(protocols):
        if protocols.count(name) > 1:
            lines.append(f"evaluation.protocols has {name!r} twice.")
    for name in protocols:
        mistake = _mistake_in(name)
        if mistake:
            lines.append(f"evaluation.protocols has {name!r}, {mistake}")
    return lines


def refuse_untestable(protocols: Iterable[str], data: ClientData, objective: Objective) -> None:
    """Raise a ConfigError if a protocol cannot be used with the data and objective."""
    for name in protocols:
        reason = _why_untestable(name, data, objective)
        if reason:
            raise ConfigError(f"evaluation.protocols has {name!r}, {reason}")


def _why_untestable(name: str, data: ClientData, objective: Objective) -> str:
    """Say why a protocol cannot be used with the data and objective; empty if it can."""
    if name == "val" and not data.sizes("val").any():
        return "but no client has validation samples; set data.val_fraction."
    if name == "unseen" and not len(data.unseen):
        return "but all clients take part in training; set data.unseen_fraction."
    if name in WEIGHTED and objective.targets != "classes":
        return "which needs one class for each sample."

    # A population has no arrays; it makes samples on request.
    inputs = getattr(data, "inputs", None)
    labels = getattr(data, "labels", None)
    if name.startswith(_CORRUPT):
        if len(data.input_shape) != 3:
            return f"but the samples of {data.name!r} are not images."
        if inputs is None:
            return "which is not available for a described population."
        if inputs.dtype != np.uint8:
            return f"which is for images in uint8, but those of {data.name!r} are {inputs.dtype}."
        return ""
    if name.startswith(_OOD):
        pool = pool_of(name, data.pools)
        if labels is None:
            return ""
        pool_labels = labels[data.pool(pool)]
        if objective.targets in ("classes", "labels") and (pool_labels < 0).any():
            return f"but samples of the pool {pool!r} have no known class."
        if objective.targets == "numbers" and np.isnan(pool_labels).any():
            return f"but the pool {pool!r} has other targets."
    return ""


def pool_of(protocol: str, pools: Collection[str]) -> str:
    """Return the pool that the protocol ``ood/NAME`` tests on: the one called ``ood/NAME``, or else NAME.

    Raises
    ------
    ConfigError : if there is neither.
    """
    for name in (protocol, protocol.removeprefix(_OOD)):
        if name in pools:
            return name

    pool = protocol.removeprefix(_OOD)
    hint = did_you_mean(pool, [name.removeprefix(_OOD) for name in pools]) if pools else "there are no pools."
    raise ConfigError(f"evaluation.protocols has {protocol!r}, but data has no pool called {pool!r}; {hint}")


def ood_test_sets(
    protocol: str, test_samples: np.ndarray, pools: Mapping[str, np.ndarray]
) -> Iterator[EvaluationSamples]:
    """Yield the samples of ``ood/...``: a pool, or all clients' test samples in one severity or in each."""
    if not protocol.startswith(_CORRUPT):
        yield EvaluationSamples(pools[pool_of(protocol, pools)])
        return

    corruption, _, severity_text = protocol.removeprefix(_CORRUPT).partition("/")
    severities = (int(severity_text),) if severity_text else SEVERITIES
    for severity in severities:
        yield EvaluationSamples(test_samples, Corruption(corruption, severity))


def _mistake_in(name: str) -> str:
    """Say what is wrong with the name of a protocol; empty if nothing is."""
    if name in _FIXED:
        return ""

    if name.startswith(_CORRUPT):
        corruption, slash, severity = name.removeprefix(_CORRUPT).partition("/")
        if corruption not in CORRUPTIONS:
            return f"but there is no corruption {corruption!r}; {did_you_mean(corruption, CORRUPTIONS)}"
        if slash and severity not in map(str, SEVERITIES):
            return f"but severities are 1 to {SEVERITIES[-1]}."
        return ""
    if name.startswith(_OOD) and name != _OOD:
        return ""

    base, slash, _ = name.partition("/")
    if slash and base in OWN_SPLITS:
        return f"which is not a protocol; masked outputs are {base!r} with evaluation.masks=[zero] or [exclude]."
    return f"which is not a protocol; {did_you_mean(name, PROTOCOLS)}"


def class_weights(protocol: str, counts: Tensor) -> Tensor:
    """Return class weights ``[..., C]`` of clients with ``counts[..., C]`` training samples (Dai et al. 2023)."""
    return counts if protocol == "pm_l" else (counts > 0).to(counts.dtype)
