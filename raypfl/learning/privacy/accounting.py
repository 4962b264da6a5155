"""The epsilon that clients have spent, by Opacus' accountant for Renyi differential privacy."""

from __future__ import annotations

import math
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from raypfl.common.optional_packages import not_installed
from raypfl.learning.privacy.settings import PrivacySettings
from raypfl.learning.privacy.spending import SPENDING, Spending

ALL = "all"
"""Name of the composition of all branches."""

ORDERS = [*(1 + x / 10.0 for x in range(1, 100)), *range(12, 64)]
"""Orders of the Renyi divergence, the defaults of Opacus' accountant."""

Mechanism = tuple[float, float]
"""A sampled Gaussian: the sampling rate and the noise multiplier."""


def refuse_without_accountant(settings: PrivacySettings) -> None:
    """Raise a ConfigError if epsilons are to be computed and Opacus is not installed."""
    if settings.noise and find_spec("opacus") is None:
        raise not_installed("privacy.noise is set", "opacus", "privacy")


def epsilon(steps: Mapping[Mechanism, int], delta: float) -> float:
    """Return the epsilon of this many steps of each mechanism, composed; infinite without noise."""
    steps = {mechanism: count for mechanism, count in steps.items() if count}
    if not steps:
        return 0.0
    if any(noise == 0 for _, noise in steps):
        return math.inf

    # Renyi divergences of composed mechanisms add up.
    total = sum(count * np.array(_renyi(rate, noise)) for (rate, noise), count in steps.items())
    with warnings.catch_warnings():
        # Opacus warns that another order might give a smaller epsilon; the larger one holds too.
        warnings.simplefilter("ignore")
        spent, _ = _opacus().get_privacy_spent(orders=ORDERS, rdp=total, delta=delta)
    return max(0.0, float(spent))


def epsilons_of(spent: Iterable[Spending], settings: PrivacySettings) -> dict[int, float]:
    """Return the epsilon of all that each client spent, composed, by client."""
    rows = [(0, "training", *spending) for spending in spent]
    columns = {name: [row[i] for row in rows] for i, name in enumerate(SPENDING)}
    table = accounted(columns, settings)
    epsilons = {}
    for client, branch, value in zip(table["client"], table["branch"], table["epsilon"], strict=True):
        if branch == ALL:
            epsilons[client] = value
    return epsilons


def accounted(table: Mapping[str, list[Any]], settings: PrivacySettings) -> dict[str, list[Any]]:
    """Return the columns client, branch, steps and epsilon: a row for each client and branch, and one for all branches.

    Only the last predictions count: they train from the models of a round, and nothing trains on their results.

    `table` : the columns of `SPENDING`.
    """
    rows = list(zip(*(table[name] for name in SPENDING), strict=True))
    last_prediction = max((row[0] for row in rows if row[1] == "prediction"), default=0)

    spent: dict[int, dict[str, Counter[Mechanism]]] = defaultdict(lambda: defaultdict(Counter))
    for round, phase, client, branch, rate, steps, uses in rows:
        if phase == "training" or round == last_prediction:
            # Several noisy sums of one batch reveal as much as one with less noise.
            mechanism = (rate, (settings.noise or 0.0) / math.sqrt(uses))
            spent[client][branch][mechanism] += steps
            spent[client][ALL][mechanism] += steps

    columns: dict[str, list[Any]] = {"client": [], "branch": [], "steps": [], "epsilon": []}
    for client, branches in sorted(spent.items()):
        for branch, counts in sorted(branches.items(), key=lambda item: (item[0] == ALL, item[0])):
            columns["client"].append(client)
            columns["branch"].append(branch)
            columns["steps"].append(sum(counts.values()))
            columns["epsilon"].append(epsilon(counts, settings.delta))
    return columns


@cache
def _opacus() -> ModuleType:
    """Import Opacus' module of divergences alone: the rest of Opacus takes seconds to import."""
    package = find_spec("opacus")
    assert package is not None and package.origin is not None, "a run with noise requires Opacus"
    file = Path(package.origin).with_name("accountants") / "analysis" / "rdp.py"

    spec = spec_from_file_location("raypfl_opacus_rdp", file)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@lru_cache(maxsize=4096)
def _renyi(rate: float, noise: float) -> tuple[float, ...]:
    return tuple(_opacus().compute_rdp(q=rate, noise_multiplier=noise, steps=1, orders=ORDERS))
