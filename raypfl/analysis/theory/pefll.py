"""PeFLL's guarantees (Scott, Zakerinia and Lampert 2024): a PAC-Bayes bound and the rate of its convergence.

With networks of usual size the bound says nothing, since the squared norms of their parameters are large.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log, sqrt

from raypfl.common.errors import ConfigError


def gaussian_kl(squared_norm: float, variance: float) -> float:
    """Return the KL divergence of ``N(mean, variance I)`` from ``N(0, variance I)``, for ``||mean||^2``."""
    return squared_norm / (2 * variance)


def meta_term(clients: int, delta: float, kl: float = 0.0) -> float:
    """Return the bound's term for having seen n clients and not all (Theorem 3.2).

    Parameters
    ----------
    clients : n, drawn independently.
    delta : probability with which the bound may fail.
    kl : KL divergence of the posterior of both networks from the prior: the sum of :func:`gaussian_kl` of each.
    """
    _require(clients >= 1 and 0 < delta < 1 and kl >= 0, "n >= 1, 0 < delta < 1 and a KL of 0 or more")
    return sqrt((kl + log(2 * sqrt(clients) / delta)) / (2 * clients))


def client_term(clients: int, samples: int, delta: float, kl: float = 0.0) -> float:
    """Return the bound's term for having m samples of each of n clients (Theorem 3.2).

    Parameters
    ----------
    clients : n.
    samples : m, the number of samples of each client.
    delta : probability with which the bound may fail.
    kl : the sum over clients of their models' KL: ``gaussian_kl(||theta_i||^2, alpha_theta)``.
    """
    _require(samples >= 1 and 0 < delta < 1 and kl >= 0, "m >= 1, 0 < delta < 1 and a KL of 0 or more")
    count = samples * clients
    return sqrt((kl + log(8 * count / delta) + 1) / (2 * count))


def risk_bound(risk: float, meta: float, client: float, largest_loss: float = 1.0) -> float:
    """Bound the expected loss on a new client, with probability ``1 - delta``, by the mean loss on the clients seen.

    Parameters
    ----------
    risk : mean training loss, of a loss between 0 and `largest_loss`.
    meta, client : results of :func:`meta_term` and :func:`client_term`, the latter in the mean over the posterior.
    """
    _require(0 <= risk <= largest_loss, f"a loss from 0 to {largest_loss}")
    return risk + largest_loss * (meta + client)


@dataclass(frozen=True, kw_only=True)
class Smoothness:
    """The constants that Theorem 3.1 assumes.

    Attributes
    ----------
    b1, b2 : bounds of ``||grad_theta f_i||`` and of ``||grad_eta h||``.
    l1, l2, l3 : Lipschitz constants of the gradients of ``f_i``, of ``h`` and of the server's objective.
    gradient_variance : sigma_1^2, of stochastic gradients.
    dissimilarity : gamma_G^2, of the clients' gradients.
    hyper_variance, model_variance : sigma_2^2 and sigma_3^2: of h's gradient, and of h, over descriptor batches of one.
    """

    b1: float
    b2: float
    l1: float
    l2: float
    l3: float
    gradient_variance: float = 0.0
    dissimilarity: float = 0.0
    hyper_variance: float = 0.0
    model_variance: float = 0.0

    @property
    def of_objective(self) -> float:
        """L, Lipschitz constant of the whole objective's gradient (Lemma C.1)."""
        return self.b1 * self.l2 + self.b2**2 * self.l1 + self.l3


def gradient_bound(
    constants: Smoothness, gap: float, *, lr: float, steps: int, rounds: int, cohort: int, batch: int | None = None
) -> float:
    """Bound the mean over the rounds of ``E ||grad F(eta_t)||^2`` (proof of Theorem 3.1, explicit in beta).

    The proof needs a small rate: ``56 L lr steps <= 1`` and ``28 L1^2 b2^2 lr steps^2 cohort <= L`` suffice.

    Parameters
    ----------
    gap : ``F(eta_0) - F*``.
    lr, steps : beta and k, of local training.
    rounds, cohort : T and c.
    batch : b, the number of samples that describe a client; None: all. Then all terms fall with the rate.
    """
    s = constants
    smooth = constants.of_objective
    if 56 * smooth * lr * steps > 1 or 28 * (s.l1 * s.b2) ** 2 * lr * steps**2 * cohort > smooth:
        raise ConfigError(
            f"The proof of PeFLL's rate needs a smaller learning rate than {lr}: 56 L lr steps <= 1 and "
            f"28 L1^2 b2^2 lr steps^2 cohort <= L, with L = {smooth:.3g}."
        )

    descent = 2 * gap / (lr * steps * rounds)
    drift = 56 * (s.l1 * s.b1 * s.b2 * lr * steps) ** 2
    noise = smooth * lr * (6 * s.gradient_variance + 4 * steps * s.dissimilarity) / cohort
    floor = 8 * s.b1**2 * s.hyper_variance + 14 * (s.l1 * s.b2) ** 2 * s.model_variance
    return descent + drift + noise + (0.0 if batch is None else floor / batch)


def _require(holds: bool, needed: str) -> None:
    if not holds:
        raise ConfigError(f"PeFLL's bound needs {needed}.")
