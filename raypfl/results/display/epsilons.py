"""The privacy that runs guarantee their clients, as epsilons."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import NamedTuple

from raypfl.learning.privacy.accounting import ALL
from raypfl.results.run_groups import RunGroup

_PROTECTED = {"sample": "one sample of a client", "client": "all samples of a client"}


class Epsilons(NamedTuple):
    """The epsilons of a branch of training, over the clients of all seeds that took part.

    Attributes
    ----------
    branch : the client function and the number of the training in it; or ``all``, which composes all branches.
    mean, std, least, most : the mean, standard deviation, least and largest epsilon of these clients.
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
    """Return a row for each branch, and a last one for all of them together; no rows without privacy."""
    by_branch: dict[str, list[float]] = {}
    for result in group.results:
        if result.privacy is None:
            continue
        branches = result.privacy["branch"].to_pylist()
        for branch, epsilon in zip(branches, result.privacy["epsilon"].to_pylist(), strict=True):
            by_branch.setdefault(branch, []).append(epsilon)

    rows = []
    for branch in sorted(by_branch, key=lambda branch: (branch == ALL, branch)):
        values = by_branch[branch]
        rows.append(Epsilons(branch, fmean(values), _deviation(values), min(values), max(values)))
    return rows


def privacy_sentence(group: RunGroup) -> str:
    """Return what is protected, and how well; empty without privacy."""
    rows = epsilons(group)
    if not rows:
        return ""

    settings = group.results[0].experiment.privacy
    *branches, whole = rows
    text = (
        f"{group.label}, privacy of {_PROTECTED[settings.unit]}: epsilon {whole.mean:.2f} at delta "
        f"{settings.delta:g}, the mean over clients (standard deviation {whole.std:.2f}, largest {whole.most:.2f})."
    )
    if len(branches) > 1:
        alone = ", ".join(f"{row.training} {row.mean:.2f}" for row in branches)
        text += f" Mean epsilon of each training alone: {alone}."
    return text


def _deviation(values: Sequence[float]) -> float:
    # An infinite epsilon has no deviation.
    return pstdev(values) if all(value < float("inf") for value in values) else 0.0
