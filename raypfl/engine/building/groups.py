"""The sizes of a run's groups, and what each client costs, from the settings."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from raypfl.federation.exchange.grouping import evaluation_group_sizes, even_sizes, group_sizes

if TYPE_CHECKING:
    from raypfl.experiment import Experiment
    from raypfl.federation.settings import EngineSettings


def groups_for(engine: EngineSettings, num_clients: int, evaluation: bool = False) -> list[int]:
    """Return the sizes of the groups of a cohort: as the settings say, or by the executor and the number of clients.

    `evaluation` : whether the clients are evaluated, not trained.
    """
    if engine.group_size:
        return even_sizes(num_clients, math.ceil(num_clients / engine.group_size))

    suggest_sizes = evaluation_group_sizes if evaluation else group_sizes
    return suggest_sizes(num_clients, engine.executor)


def client_costs(experiment: Experiment, num_samples: np.ndarray) -> np.ndarray:
    """Return ``float[num_clients]``: SGD steps of each client in a round, by which groups are cut and ordered."""
    training = experiment.training
    if training.steps is not None:
        return np.full(len(num_samples), float(training.steps))
    return np.ceil(num_samples / training.batch_size) * training.epochs
