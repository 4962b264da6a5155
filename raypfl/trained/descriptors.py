"""PeFLL's descriptors of clients: distances between them, beside distances between label mixes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raypfl.common import rng
from raypfl.common.errors import ConfigError, DataError
from raypfl.common.messages import unmarked
from raypfl.data import FederatedData
from raypfl.methods.personal_models.pefll import PeFLL
from raypfl.trained.models import TrainedModels


@dataclass(frozen=True)
class Descriptors:
    """The descriptors of a run's clients, of all their training samples.

    Attributes
    ----------
    values : ``float64[n, l]``.
    mixes : ``float64[n, C]``, the share of each class in a client's training samples.
    unseen : ``int64[U]``, the clients that were never trained.
    """

    values: np.ndarray
    mixes: np.ndarray
    unseen: np.ndarray

    def distances(self, clients: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return distances of descriptors and of label mixes, from these clients to all others.

        Each is ``[len(clients), n - 1]``.
        """
        is_other = np.arange(len(self.values))[None] != clients[:, None]

        def distances_of(rows: np.ndarray) -> np.ndarray:
            to_all = np.linalg.norm(rows[clients][:, None] - rows[None], axis=2)
            return to_all[is_other].reshape(len(clients), -1)

        return distances_of(self.values), distances_of(self.mixes)

    @property
    def rank_correlations(self) -> np.ndarray:
        """For each unseen client, Spearman's correlation of both distances to all others (Scott et al., Fig. 3)."""
        from scipy.stats import spearmanr  # slow to import

        return np.array([spearmanr(a, b).statistic for a, b in zip(*self.distances(self.unseen), strict=True)])


def descriptors_of(models: TrainedModels, server: Mapping[str, Any] | None = None) -> Descriptors:
    """Return the descriptors of all clients of a run.

    Parameters
    ----------
    server : the server's state, as ``result.server_states()`` gives it for earlier rounds; None: that at the end.

    Raises
    ------
    ConfigError : if the method has no descriptors.
    """
    method = models.experiment.method
    server = models.server if server is None else server
    if not isinstance(method, PeFLL):
        raise ConfigError(f"{type(method).__name__} has no descriptors; pefll has.")

    values_by_group = []
    counts_by_group = []
    for group in models.groups():
        values_by_group.append(unmarked(method.descriptors(group, server["embed"])).double().numpy())
        counts_by_group.append(unmarked(group.label_counts()).double().numpy())
    counts = np.concatenate(counts_by_group)
    mixes = counts / counts.sum(1, keepdims=True)
    return Descriptors(np.concatenate(values_by_group), mixes, np.asarray(models.outline.unseen))


def extrapolated(
    models: TrainedModels, alphas: Sequence[float], *, clients: int = 20, samples: int = 20, seed: int = 0
) -> dict[float, np.ndarray]:
    """Return accuracies of new clients with label mixes drawn from Dirichlet distributions (Scott et al., Fig. 4).

    The samples are test samples of the run's clients, which nothing was trained on. The same seed gives the same
    clients, so runs of several methods can be compared.

    Parameters
    ----------
    models : the models of a run whose method makes models for new clients.
    alphas : the concentrations; the smaller, the fewer classes a client has.
    clients : the number of clients for each alpha.
    samples : the number of samples of a client, half of which are for the test.

    Returns
    -------
    alpha -> accuracies ``float64[clients]``.
    """
    data = models.outline.data
    if not isinstance(data, FederatedData) or models.outline.kind != "classes":
        raise ConfigError("Extrapolation needs stored data with classes.")

    tests = np.concatenate([data.indices(client, "test") for client in range(models.num_clients)])
    tests_by_class = [tests[data.labels[tests] == label] for label in range(data.num_classes)]
    fewest = min(map(len, tests_by_class))
    if fewest < samples:
        raise DataError(f"A class has {fewest} test samples, fewer than the {samples} of a new client.")

    accuracies = {}
    for number, alpha in enumerate(alphas):
        draws = rng.generator(seed, "extrapolation", number)
        samples_by_client = []
        for mix in draws.dirichlet([alpha] * data.num_classes, size=clients):
            counts = draws.multinomial(samples, mix)
            indices = []
            for candidates, count in zip(tests_by_class, counts, strict=True):
                indices.append(draws.choice(candidates, count, replace=False))
            samples_by_client.append(data.take(np.concatenate(indices)))
        new_clients = models.personalize_all(samples_by_client, held_out=0.5)
        accuracies[alpha] = np.array([client.metrics["accuracy"] for client in new_clients])
    return accuracies
