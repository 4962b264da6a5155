"""Epsilons of what was spent, by Opacus' accountant for Renyi differential privacy."""

from __future__ import annotations

import math
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import numpy as np

from raypfl.common.packages import not_installed
from raypfl.learning.privacy.settings import PrivacySettings
from raypfl.learning.privacy.spending import SPENDING, Spending

ALL = "all"
"""The branch that stands for the composition of all others."""

Mechanism = tuple[float, float]
"""A sampled Gaussian: the sampling rate and the noise multiplier."""


def refuse_without_accountant(settings: PrivacySettings) -> None:
    """Raise a ConfigError if epsilons are to be computed and Opacus is not installed."""
    if settings.noise and find_spec("opacus") is None:
        raise not_installed("privacy.noise is set", "opacus", "privacy")


def epsilon(steps: Mapping[Mechanism, int], delta: float) -> float:
    """The epsilon of this many steps of each mechanism, composed; infinite without noise."""
    if not any(steps.values()):
        return 0.0
    if any(noise == 0 for (_, noise), count in steps.items() if count):
        return math.inf
    from opacus.accountants.analysis.rdp import get_privacy_spent

    total = sum(count * np.array(_renyi(rate, noise)) for (rate, noise), count in steps.items() if count)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that another order might be better: the epsilon holds
        spent, _ = get_privacy_spent(orders=_orders(), rdp=total, delta=delta)
    return max(0.0, float(spent))


def epsilons_of(spent: Iterable[Spending], settings: PrivacySettings) -> dict[int, float]:
    """The epsilon of each client for all that it spent, composed."""
    rows = [(0, "training", *one) for one in spent]
    table = accounted({name: [row[i] for row in rows] for i, name in enumerate(SPENDING)}, settings)
    columns = zip(table["client"], table["branch"], table["epsilon"], strict=True)
    return {client: value for client, branch, value in columns if branch == ALL}


def accounted(table: Mapping[str, list[Any]], settings: PrivacySettings) -> dict[str, list[Any]]:
    """Columns client, branch, steps and epsilon: a row for each client and branch, and one for all branches composed.

    Of predictions, which train from the models of a round and are not trained on, only the last ones count.

    Parameters
    ----------
    table : columns of `SPENDING`.
    """
    rows = list(zip(*(table[name] for name in SPENDING), strict=True))
    last = max((row[0] for row in rows if row[1] == "prediction"), default=0)
    spent: dict[int, dict[str, Counter[Mechanism]]] = defaultdict(lambda: defaultdict(Counter))
    for round, phase, client, branch, rate, steps, uses in rows:
        if phase == "training" or round == last:
            mechanism = (rate, (settings.noise or 0.0) / math.sqrt(uses))
            for name in (branch, ALL):
                spent[client][name][mechanism] += steps
    columns: dict[str, list[Any]] = {"client": [], "branch": [], "steps": [], "epsilon": []}
    for client, branches in sorted(spent.items()):
        for branch, steps in sorted(branches.items(), key=lambda pair: (pair[0] == ALL, pair[0])):
            row = (client, branch, sum(steps.values()), epsilon(steps, settings.delta))
            for column, value in zip(columns.values(), row, strict=True):
                column.append(value)
    return columns


def _orders() -> list[float]:
    from opacus.accountants import RDPAccountant

    return RDPAccountant.DEFAULT_ALPHAS


@lru_cache(maxsize=4096)
def _renyi(rate: float, noise: float) -> tuple[float, ...]:
    from opacus.accountants.analysis.rdp import compute_rdp

    return tuple(compute_rdp(q=rate, noise_multiplier=noise, steps=1, orders=_orders()))
