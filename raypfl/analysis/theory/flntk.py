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
"""Of the proof's conditions on rates and radius."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What the theorems know of a run.

    Attributes
    ----------
    parts : samples of each client. width : m. steps : K.
    rate, server_rate : eta_local, on the sum of a client's halved squared errors, and eta_global.
    sigma : standard deviation of the initial weights.
    delta : probability with which the guarantees may fail.
    full_participation, full_batch : whether all clients take part in every round, and take steps on all their samples.
    """

    parts: Sequence[Tensor]
    width: int
    steps: int
    rate: float
    server_rate: float = 1.0
    sigma: float = 1.0
    delta: float = 0.1
    full_participation: bool = True
    full_batch: bool = True

    @property
    def clients(self) -> int:
        return len(self.parts)

    @property
    def rho(self) -> float:
        """The step of a whole round."""
        return self.rate * self.server_rate * self.steps / self.clients

    def map(self, kernel: Tensor) -> RoundMap:
        """The round with this kernel, frozen."""
        count = self.clients
        weights, rates, steps = [1 / count] * count, [self.rate] * count, [self.steps] * count
        return RoundMap.of(kernel, self.parts, weights, rates, steps, self.server_rate)


@dataclass(frozen=True)
class Condition:
    """A condition of the convergence theorem, and by what it is met or missed."""

    name: str
    needs: str
    found: str
    met: bool


@dataclass(frozen=True)
class Report:
    """What the theory says about a run before it begins.

    Attributes
    ----------
    least, least_infinite : lambda of H(0), of which the rate is made, and of H_inf.
    condition : kappa of H(0).
    rho, rate : the step of a round, and the theorem's factor of the squared error per round, ``1 - rho lambda / 2``.
    norm, spectral_radius : of the round with H(0) frozen, each squared: the largest factor of the squared error in any
        round, and the one after many rounds.
    applies : whether the squared error falls by the theorem's factor in every round with H(0) frozen; ``asymptotic``:
        only after many.
    verdict : the same as a sentence.
    conditions : of the theorem.
    radius, local_radius : bounds of how far a neuron's weights move, in the server's model and in the clients'.
    required_width : smallest m for which the proof's conditions on it hold.
    rounds : by the theorem, until the squared error is `share` of the first one; None: it gives none.
    predicted_rounds : the same with H(0) frozen; None: never, or the run would diverge.
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
    conditions: tuple[Condition, ...]
    radius: float
    local_radius: float
    required_width: float
    share: float
    rounds: int | None
    predicted_rounds: int | None

    def to_dict(self) -> dict[str, Any]:
        """Numbers, texts, lists and dicts, for JSON; what is infinite is None."""
        plain = asdict(self)
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in plain.items()}


def report(setting: Setting, x: Tensor, kernel: Tensor, infinite: Tensor, error: Tensor, share: float = 0.1) -> Report:
    """The theory of a run.

    Parameters
    ----------
    x : inputs ``[n, d]``.
    kernel, infinite : H(0) and H_inf, ``[n, n]``.
    error : ``y(0) - y``, ``[n]``.
    share : of the first squared error, until which rounds are counted.
    """
    spectrum = Spectrum.of(kernel)
    positive = math.isfinite(spectrum.condition)
    least = spectrum.least if positive else 0.0
    q, frozen = 1 - setting.rho * least / 2, setting.map(kernel)
    applies, verdict = _verdict(setting, least, q, frozen)
    radius, width = _radius(8, setting, error, least), _required_width(setting, error, least)
    return Report(
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
    """Rounds until a squared error that falls by `rate` per round is this share of the first one."""
    if not (0 < share < 1 and 0 < rate < 1):
        raise ConfigError(f"Rounds can be counted for a share and a rate between 0 and 1, not {share} and {rate}.")
    return math.ceil(math.log(share) / math.log(rate))


def literal_rate(spectrum: Spectrum, samples: int, steps: int) -> float:
    """The largest local rate that the theorem allows: ``lambda / (1000 kappa n^2 K)``."""
    return spectrum.least / (CONSTANT * spectrum.condition * samples**2 * steps)


def _verdict(setting: Setting, least: float, q: float, frozen: RoundMap) -> tuple[Any, str]:
    if not setting.full_participation or not setting.full_batch:
        what = "all samples in every step" if setting.full_participation else "all clients in every round"
        return "no", f"The theorem is for {what}, which is not the case here."
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
    setting: Setting, x: Tensor, spectrum: Spectrum, positive: bool, radius: float, width: float
) -> tuple[Condition, ...]:
    n, lengths = len(x), x.norm(dim=1)
    least = spectrum.least if positive else 0.0
    rate = literal_rate(spectrum, n, setting.steps) if positive else 0.0
    near = least * setting.sigma / (CONSTANT * n)
    away = float((lengths - 1).abs().max())
    product = setting.rate * setting.server_rate

    def at_most(name: str, bound: float, found: float) -> Condition:
        return Condition(name, f"<= {bound:.3g}", f"{found:.3g}", found <= bound and bound > 0)

    return (
        Condition("lambda", "above 0, at most 1", f"{least:.3g}", 0 < least <= 1),
        Condition("length of inputs", "1", "1" if away < 1e-5 else f"1 +- {away:.3g}", away < 1e-5),
        at_most("eta_local", rate, setting.rate),
        at_most("eta_local eta_global", rate, product),
        Condition("width", f">= {width:.3g}", str(setting.width), setting.width >= width),
        at_most("radius of weights", near, radius),
        Condition("all clients in every round", "yes", _yes(setting.full_participation), setting.full_participation),
        Condition("all samples in every local step", "yes", _yes(setting.full_batch), setting.full_batch),
    )


def _yes(fact: bool) -> str:
    return "yes" if fact else "no"


def _radius(constant: int, setting: Setting, error: Tensor, least: float) -> float:
    top = constant * math.sqrt(len(error)) * float(error.norm())
    return top / (math.sqrt(setting.width) * least) if least else math.inf


def _required_width(setting: Setting, error: Tensor, least: float) -> float:
    """Such that the radius is small enough, and the proof's events fail with probability delta at most."""
    if not least:
        return math.inf
    n, near = len(error), least / (CONSTANT * len(error))
    by_radius = (12 * math.sqrt(n) * float(error.norm()) / least / near) ** 2 / setting.sigma**2
    by_events = max(math.log(3 * n / setting.delta), 10 * math.log(3 * n**2 / setting.delta)) / near
    return max(by_radius, by_events)


def quadratic_form(infinite: Tensor, y: Tensor) -> float:
    """``y^T H_inf^-1 y``: small for targets that the kernel learns easily.

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
    """Bound of the mean of a loss from 0 to 1, that changes by at most 1 per unit of the output, on new samples.

    Attributes
    ----------
    leading : ``sqrt(2 y^T H_inf^-1 y / n)``.
    bound : with all its terms, for a width that is large enough, which is not checked.
    """

    leading: float
    bound: float

    @property
    def vacuous(self) -> bool:
        return self.bound >= 1


def generalization(infinite: Tensor, y: Tensor, delta: float = 0.1) -> Generalization:
    """The bound before training (Theorem 4.3, with the constants of its proof)."""
    n = len(y)
    leading = math.sqrt(2 * quadratic_form(infinite, y) / n)
    return Generalization(leading, leading + 5 / math.sqrt(n) + _deviation(n, Spectrum.of(infinite).least, delta))


def posterior_bound(
    risk: float, moved: float, radius: float, *, samples: int, width: int, least: float, sigma: float, delta: float
) -> float:
    """The bound after training, from how far the weights have moved.

    Parameters
    ----------
    risk : mean training loss, from 0 to 1.
    moved, radius : Frobenius norm of the weights' movement, and the largest movement of one neuron.
    least : lambda_min(H_inf).
    """
    n, m = samples, width
    radius = 2.0 ** math.ceil(math.log2(radius)) if radius > 0 else 0.0
    spread = math.ceil(moved) / math.sqrt(2 * n) * (1 + (2 * math.log(18 / delta) / m) ** 0.25)
    curvature = 2 * radius**2 * math.sqrt(m) / sigma + radius * math.sqrt(2 * math.log(18 / delta))
    return risk + 2 * (spread + curvature) + _deviation(n, least, delta)


def _deviation(samples: int, least: float, delta: float) -> float:
    radii = math.ceil(math.sqrt(samples / least)) + 1
    return 3 * math.sqrt(math.log(6 * radii / delta) / (2 * samples))
