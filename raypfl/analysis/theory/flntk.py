"""FL-NTK's guarantees (Huang, Li, Song and Yang 2021): rate, preconditions, radii and the generalization bound.

The theorems are about wide two-layer ReLU networks on inputs of length 1, with full-batch steps on the sum of squared
errors, all clients in every round, and their plain mean. Their constants are the proof's, with its slips mended.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from raypfl.analysis.theory.kernels import Spectrum
from raypfl.analysis.theory.rounds import RoundMap
from raypfl.common.errors import ConfigError

CONSTANT = 1000
"""Constant of the proof's conditions on rates and radius."""


@dataclass(frozen=True, kw_only=True)
class TheoremSetting:
    """The quantities of a run on which the theorems depend.

    Attributes
    ----------
    parts : samples of each client.
    width : m, the number of neurons.
    steps : K, the number of local steps.
    rate, server_rate : eta_local, on the sum of a client's halved squared errors, and eta_global.
    sigma : standard deviation of the initial weights.
    delta : probability with which the guarantees may fail.
    """

    parts: Sequence[Tensor]
    width: int
    steps: int
    rate: float
    server_rate: float = 1.0
    sigma: float = 1.0
    delta: float = 0.1

    @property
    def clients(self) -> int:
        return len(self.parts)

    @property
    def rho(self) -> float:
        """The step of a whole round, ``eta_local eta_global K / N``."""
        return self.rate * self.server_rate * self.steps / self.clients

    def map(self, kernel: Tensor) -> RoundMap:
        """Return the map of a round with this kernel frozen."""
        count = self.clients
        return RoundMap.of(
            kernel,
            self.parts,
            weights=[1 / count] * count,
            rates=[self.rate] * count,
            steps=[self.steps] * count,
            server_rate=self.server_rate,
        )


@dataclass(frozen=True)
class TheoremCondition:
    """A condition of the convergence theorem, with what it needs and the run's value."""

    name: str
    needs: str
    found: str
    met: bool


@dataclass(frozen=True)
class TheoryReport:
    """The theory of a run, before it starts.

    Attributes
    ----------
    least, least_infinite : lambda of H(0), on which the rate depends, and of H_inf.
    condition : kappa of H(0).
    rho, rate : the step of a round, and the theorem's factor of the squared error per round, ``1 - rho lambda / 2``.
    norm, spectral_radius : squared norm and spectral radius of the round with H(0) frozen: the largest factor of the
        squared error in any round, and its factor after many rounds.
    applies : whether the squared error falls by the theorem's factor in every round with H(0) frozen; ``asymptotic``:
        only after many.
    verdict : `applies` as a sentence.
    conditions : the theorem's conditions.
    radius, local_radius : bounds of how far a neuron's weights move, in the server's model and in the clients'.
    required_width : smallest m for which the proof's conditions on it hold.
    share : share of the first squared error, until which rounds are counted.
    rounds : the theorem's number of rounds until then; None: it gives none.
    predicted_rounds : number of rounds until then with H(0) frozen; None: never, or the run would diverge.
    """

    least: float
    least_infinite: float
    condition: float
    rho: float
    rate: float
    norm: float
    spectral_radius: float
    applies: Literal["yes", "asymptotic", "no"]
    verdict: str
    conditions: tuple[TheoremCondition, ...]
    radius: float
    local_radius: float
    required_width: float
    share: float
    rounds: int | None
    predicted_rounds: int | None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as numbers, texts, lists and dicts, for JSON, which has no infinity: it becomes None."""
        values = asdict(self)
        for name, value in values.items():
            if isinstance(value, float) and not math.isfinite(value):
                values[name] = None
        return values


def theory_report(
    setting: TheoremSetting, x: Tensor, kernel: Tensor, infinite: Tensor, error: Tensor, share: float = 0.1
) -> TheoryReport:
    """Return the theory of a run.

    Parameters
    ----------
    x : inputs ``[n, d]``.
    kernel, infinite : H(0) and H_inf, ``[n, n]``.
    error : ``y(0) - y``, ``[n]``.
    share : share of the first squared error, until which rounds are counted.
    """
    spectrum = Spectrum.of(kernel)
    positive = math.isfinite(spectrum.condition)
    least = spectrum.least if positive else 0.0
    q = 1 - setting.rho * least / 2
    frozen = setting.map(kernel)
    applies, verdict = _verdict(setting, least, q, frozen)
    radius = _radius(8, setting, error, least)
    width = _required_width(setting, error, least)

    return TheoryReport(
        least=least,
        least_infinite=Spectrum.of(infinite).least,
        condition=spectrum.condition,
        rho=setting.rho,
        rate=q,
        norm=frozen.norm**2,
        spectral_radius=frozen.spectral_radius**2,
        applies=applies,
        verdict=verdict,
        conditions=_conditions(setting, x, spectrum, positive, radius, width),
        radius=radius,
        local_radius=_radius(12, setting, error, least),
        required_width=width,
        share=share,
        rounds=rounds_to(share, q) if 0 < q < 1 else None,
        predicted_rounds=frozen.rounds_to(error, share),
    )


def rounds_to(share: float, rate: float) -> int:
    """Return the rounds until a squared error that falls by `rate` per round is this share of the first one."""
    if not (0 < share < 1 and 0 < rate < 1):
        raise ConfigError(f"Rounds can be counted for a share and a rate between 0 and 1, not {share} and {rate}.")
    return math.ceil(math.log(share) / math.log(rate))


def literal_rate(spectrum: Spectrum, samples: int, steps: int) -> float:
    """Return the largest local rate that the theorem allows: ``lambda / (1000 kappa n^2 K)``."""
    return spectrum.least / (CONSTANT * spectrum.condition * samples**2 * steps)


def _verdict(setting: TheoremSetting, least: float, q: float, frozen: RoundMap) -> tuple[Any, str]:
    """Return `applies` and `verdict` of a report; q is the theorem's factor of the squared error per round."""
    if least == 0:
        return "no", "lambda = 0: no guarantee. Some inputs are equal, or too many for this width."
    if frozen.diverges:
        return "no", f"With H(0) frozen the run diverges: the error grows by {frozen.spectral_radius:.3g} per round."
    if q <= 0:
        return "no", f"rho lambda / 2 is {1 - q:.3g}, which must be below 1."

    if frozen.spectral_radius**2 > q:
        return "no", (
            "eta_local K lambda_max(H_cc) is too large, so that local steps no longer add up: with H(0) frozen the "
            f"squared error is multiplied by {frozen.spectral_radius**2:.4f} per round, not by {q:.4f}. "
            "Trust the prediction."
        )
    if frozen.norm**2 > q:
        return (
            "asymptotic",
            f"In the long run the squared error is multiplied by at most {q:.4f} per round, but not in each one.",
        )
    return (
        "yes",
        f"The squared error is multiplied by at most {q:.4f} in every round, as long as the kernel stays near H(0).",
    )


def _conditions(
    setting: TheoremSetting, x: Tensor, spectrum: Spectrum, positive: bool, radius: float, width: float
) -> tuple[TheoremCondition, ...]:
    n = len(x)
    least = 0.0
    largest_rate = 0.0
    if positive:
        least = spectrum.least
        largest_rate = literal_rate(spectrum, n, setting.steps)
    largest_radius = least * setting.sigma / (CONSTANT * n)
    deviation = float((x.norm(dim=1) - 1).abs().max())
    unit_length = deviation < 1e-5

    def at_most(name: str, bound: float, value: float) -> TheoremCondition:
        return TheoremCondition(name, f"<= {bound:.3g}", f"{value:.3g}", value <= bound and bound > 0)

    return (
        TheoremCondition("lambda", "above 0, at most 1", f"{least:.3g}", 0 < least <= 1),
        TheoremCondition("length of inputs", "1", "1" if unit_length else f"1 +- {deviation:.3g}", unit_length),
        at_most("eta_local", largest_rate, setting.rate),
        at_most("eta_local eta_global", largest_rate, setting.rate * setting.server_rate),
        TheoremCondition("width", f">= {width:.3g}", str(setting.width), setting.width >= width),
        at_most("radius of weights", largest_radius, radius),
        # The analysis refuses other runs.
        TheoremCondition("all clients in every round", "yes", "yes", True),
        TheoremCondition("all samples in every local step", "yes", "yes", True),
    )


def _radius(constant: int, setting: TheoremSetting, error: Tensor, least: float) -> float:
    """Return the bound ``constant sqrt(n) ||y(0) - y|| / (sqrt(m) lambda)`` of a neuron's movement."""
    if not least:
        return math.inf
    return constant * math.sqrt(len(error)) * float(error.norm()) / (math.sqrt(setting.width) * least)


def _required_width(setting: TheoremSetting, error: Tensor, least: float) -> float:
    """Return the width for which the radius is small enough and the proof's events fail with probability delta."""
    if not least:
        return math.inf
    n = len(error)
    radius = least / (CONSTANT * n)
    by_radius = (12 * math.sqrt(n) * float(error.norm()) / least / radius) ** 2 / setting.sigma**2
    by_events = max(math.log(3 * n / setting.delta), 10 * math.log(3 * n**2 / setting.delta)) / radius
    return max(by_radius, by_events)


def quadratic_form(infinite: Tensor, y: Tensor) -> float:
    """Return ``y^T H_inf^-1 y``, which is small for targets that the kernel learns easily.

    Raises
    ------
    ConfigError : if H_inf has no inverse.
    """
    factor, failed = torch.linalg.cholesky_ex(infinite)
    if int(failed) or Spectrum.of(infinite).least <= 1e-12:
        raise ConfigError("The generalization bound needs lambda_min(H_inf) > 0; remove inputs that occur twice.")
    return float(y @ torch.cholesky_solve(y[:, None], factor)[:, 0])


@dataclass(frozen=True)
class Generalization:
    """Bound on new samples of the mean of a loss from 0 to 1 that changes by at most 1 per unit of the output.

    Attributes
    ----------
    leading : the leading term, ``sqrt(2 y^T H_inf^-1 y / n)``.
    bound : all terms, for a width that is large enough, which is not checked.
    """

    leading: float
    bound: float

    @property
    def vacuous(self) -> bool:
        return self.bound >= 1


def generalization(infinite: Tensor, y: Tensor, delta: float = 0.1) -> Generalization:
    """Return the bound before training (Theorem 4.3, with the constants of its proof)."""
    n = len(y)
    leading = math.sqrt(2 * quadratic_form(infinite, y) / n)
    deviation = _deviation(n, Spectrum.of(infinite).least, delta)
    return Generalization(leading, leading + 5 / math.sqrt(n) + deviation)


def posterior_bound(
    risk: float, moved: float, radius: float, *, samples: int, width: int, least: float, sigma: float, delta: float
) -> float:
    """Return the bound after training, from how far the weights have moved.

    Parameters
    ----------
    risk : mean training loss, from 0 to 1.
    moved, radius : Frobenius norm of the weights' movement, and the largest movement of one neuron.
    samples, width : n and m.
    least : lambda_min(H_inf).
    sigma, delta : as in :class:`TheoremSetting`.
    """
    # The bound is for radii from a grid: whole numbers for all weights, powers of two for one neuron.
    frobenius_radius = math.ceil(moved)
    neuron_radius = 2.0 ** math.ceil(math.log2(radius)) if radius > 0 else 0.0

    spread = frobenius_radius / math.sqrt(2 * samples) * (1 + (2 * math.log(18 / delta) / width) ** 0.25)
    curvature = 2 * neuron_radius**2 * math.sqrt(width) / sigma + neuron_radius * math.sqrt(2 * math.log(18 / delta))
    return risk + 2 * (spread + curvature) + _deviation(samples, least, delta)


def _deviation(samples: int, least: float, delta: float) -> float:
    radii = math.ceil(math.sqrt(samples / least)) + 1
    return 3 * math.sqrt(math.log(6 * radii / delta) / (2 * samples))
