"""What runs spent of their clients' privacy."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import NamedTuple

from raypfl.learning.privacy.accounting import ALL
from raypfl.results.compared import RunGroup

_UNITS = {"sample": "one sample of a client", "client": "all samples of a client"}


class Epsilons(NamedTuple):
    """The epsilons of a branch of training, over the clients of all seeds that took part.

    Attributes
    ----------
    branch : the client function and the number of the training in it, or ``all`` of them composed.
    """

    branch: str
    mean: float
    std: float
    least: float
    most: float

    @property
    def training(self) -> str:
        """The branch in words: ``model 2 of train`` is the second that clients train in the function."""
        function, _, number = self.branch.rpartition(" ")
        return f"model {number} of {function}" if number.isdigit() else self.branch


def epsilons(group: RunGroup) -> list[Epsilons]:
    """A row for each branch, and the last one for all of them; empty without privacy."""
    found: dict[str, list[float]] = {}
    for table in (result.privacy for result in group.results if result.privacy is not None):
        for branch, epsilon in zip(table["branch"].to_pylist(), table["epsilon"].to_pylist(), strict=True):
            found.setdefault(branch, []).append(epsilon)
    order = sorted(found, key=lambda branch: (branch == ALL, branch))
    return [Epsilons(branch, fmean(v), _spread(v), min(v), max(v)) for branch in order if (v := found[branch])]


def sentence(group: RunGroup) -> str:
    """What is protected, and how well; empty without privacy."""
    rows, settings = epsilons(group), group.results[0].experiment.privacy
    if not rows:
        return ""
    *parts, whole = rows
    alone = ", ".join(f"{row.training} {row.mean:.2f}" for row in parts) if len(parts) > 1 else ""
    return (
        f"{group.label}, privacy of {_UNITS[settings.unit]}: epsilon {whole.mean:.2f} at delta {settings.delta:g}, the "
        f"mean over clients (standard deviation {whole.std:.2f}, largest {whole.most:.2f})."
        + (f" Mean epsilon of each training alone: {alone}." if alone else "")
    )


def _spread(values: Sequence[float]) -> float:
    return pstdev(values) if all(value < float("inf") for value in values) else 0.0
