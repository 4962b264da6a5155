"""What PeFLL's descriptors say of clients: how far they are apart, next to how far their label mixes are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import spearmanr

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
        """From these clients to all others, ``[len(clients), n - 1]`` each: of descriptors, and of label mixes."""
        others = np.arange(len(self.values))[None] != clients[:, None]

        def apart(rows: np.ndarray) -> np.ndarray:
            whole = np.linalg.norm(rows[clients][:, None] - rows[None], axis=2)
            return whole[others].reshape(len(clients), -1)

        return apart(self.values), apart(self.mixes)

    @property
    def rank_correlations(self) -> np.ndarray:
        """For each unseen client, Spearman's correlation of both distances to all others (Scott et al., Fig. 3)."""
        return np.array([spearmanr(a, b).statistic for a, b in zip(*self.distances(self.unseen), strict=True)])


def descriptors_of(models: TrainedModels, server: Mapping[str, Any] | None = None) -> Descriptors:
    """The descriptors of all clients of a run.

    `server` : the server's state, as ``result.server_states()`` gives it for earlier rounds; None: at the end.

    Raises
    ------
    ConfigError : if the method has no descriptors.
    """
    method, server = models.experiment.method, models.server if server is None else server
    if not isinstance(method, PeFLL):
        raise ConfigError(f"{type(method).__name__} has no descriptors; pefll has.")
    parts = [(method.descriptors(group, server["embed"]), group.label_counts()) for group in models.groups()]
    values, counts = (
        np.concatenate([unmarked(one).double().numpy() for one in part]) for part in zip(*parts, strict=True)
    )
    return Descriptors(values, counts / counts.sum(1, keepdims=True), np.asarray(models.outline.unseen))


def extrapolated(
    models: TrainedModels, alphas: Sequence[float], *, clients: int = 20, samples: int = 20, seed: int = 0
) -> dict[float, np.ndarray]:
    """Accuracies of new clients whose label mixes are drawn from Dirichlet distributions (Scott et al., Fig. 4).

    The samples are test samples of the run's clients, which nothing was trained on. The same seed gives the same
    clients, so runs of several methods can be compared.

    Parameters
    ----------
    models : of a method that has a way to make models for new clients.
    alphas : the concentrations; the smaller, the fewer classes a client has.
    clients, samples : how many clients for each alpha, with how many samples, half of which are for the test.

    Returns
    -------
    alpha -> accuracies ``float64[clients]``.
    """
    data = models.outline.data
    if not isinstance(data, FederatedData) or models.outline.kind != "classes":
        raise ConfigError("Extrapolation needs stored data with classes.")
    tests = np.concatenate([data.indices(client, "test") for client in range(models.num_clients)])
    of_class = [tests[data.labels[tests] == c] for c in range(data.num_classes)]
    if min(map(len, of_class)) < samples:
        raise DataError(
            f"A class has {min(map(len, of_class))} test samples, fewer than the {samples} of a new client."
        )
    found = {}
    for number, alpha in enumerate(alphas):
        drawn = rng.generator(seed, "extrapolation", number)
        new = []
        for mix in drawn.dirichlet([alpha] * data.num_classes, size=clients):
            counts = drawn.multinomial(samples, mix)
            where = [drawn.choice(own, n, replace=False) for own, n in zip(of_class, counts, strict=True)]
            new.append(data.take(np.concatenate(where)))
        made = models.personalize_all(new, held_out=0.5)
        found[alpha] = np.array([one.metrics["accuracy"] for one in made])
    return found
