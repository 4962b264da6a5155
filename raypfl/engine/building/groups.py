"""How a cohort is cut into groups."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from raypfl.federation.exchange.grouping import evaluation_group_sizes, even_sizes, group_sizes

if TYPE_CHECKING:
    from raypfl.experiment import Experiment
    from raypfl.federation.settings import EngineSettings


def groups_for(engine: EngineSettings, cohort: int, evaluation: bool = False) -> list[int]:
    """Sizes of the groups of a cohort of `cohort` clients: as the settings say, or by the executor and the cohort.

    `evaluation` : whether the cohort is evaluated, not trained.
    """
    if engine.group_size:
        return even_sizes(cohort, math.ceil(cohort / engine.group_size))

    suggest_sizes = evaluation_group_sizes if evaluation else group_sizes
    return suggest_sizes(cohort, engine.executor)


def client_costs(experiment: Experiment, num_samples: np.ndarray) -> np.ndarray:
    """Return ``float[num_clients]``: SGD steps of each client in a round, by which groups are cut and ordered."""
    training = experiment.training
    if training.steps is not None:
        return np.full(len(num_samples), float(training.steps))
    return np.ceil(num_samples / training.batch_size) * training.epochs
