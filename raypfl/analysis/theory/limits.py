"""What limits the convergence of a run: what it did, next to what its kernels predict for it and for other settings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from raypfl.analysis.theory.flntk import TheoremSetting
from raypfl.analysis.theory.rounds import RoundMap

PACE = 1.5
"""Ratio of observed to predicted rounds above which a run is slower than predicted, or, inverted, faster."""

GAIN = 0.9
"""A change is worth naming if it takes at most this share of the rounds."""

HALVINGS = 20
"""How often a step size is halved at most in search of one that does not diverge."""

ZERO = 1e-12
"""Eigenvalues below this share of the largest one are zero but for rounding."""


@dataclass(frozen=True)
class Diagnosis:
    """What limits convergence, and the rounds that other settings are predicted to take.

    Rounds are counted until the squared error is a share of the first one.

    Attributes
    ----------
    limit : ``divergence``; ``kernel``, if no change helps; or what to change: ``width``, ``local step size``,
        ``number of local steps``, ``server's step size``, ``heterogeneity of clients``.
    sentence : what happened, and what to change.
    rounds : predicted with H(0) frozen; None: never.
    observed : in the run; None: not reached.
    change : the key in `changed` of the change that helps most; None: no change helps.
    changed : predicted rounds by change; None: never, or the run would diverge.
    """

    limit: str
    sentence: str
    rounds: int | None
    observed: int | None
    change: str | None
    changed: dict[str, int | None]


def diagnose(
    setting: TheoremSetting,
    kernel: Tensor,
    infinite: Tensor,
    error: Tensor,
    share: float,
    errors: Mapping[int, float],
    switched: float,
) -> Diagnosis:
    """Diagnose a run. Where it contradicts the prediction, the run counts.

    Parameters
    ----------
    kernel, infinite : H(0) and H_inf, ``[n, n]``.
    error : ``y(0) - y``, ``[n]``.
    share : of the first squared error, until which rounds are counted.
    errors : observed squared error by round, from round 0 to the last; rounds between may be missing.
    switched : share of neurons, over all samples, that have switched since the beginning.
    """
    frozen = setting.map(kernel)
    run = _Run.of(errors, share)
    outlook = _Outlook.of(frozen, error, share, run, switched)

    changed: dict[str, int | None] = {}
    expected: dict[str, float] = {}
    limits: dict[str, str] = {}
    for change in _changes(setting, kernel, infinite):
        rounds = change.map.rounds_to(error, share)
        changed[change.words] = rounds
        limits[change.words] = change.limit
        # A kernel that changes slows other settings at this width down as well, but not a very wide network.
        slowdown = 1 if change.limit == "width" else outlook.slowdown
        if rounds is not None and math.isfinite(slowdown):
            expected[change.words] = rounds * slowdown

    best = min(expected, key=lambda words: expected[words], default=None)
    if best is not None and expected[best] > GAIN * outlook.rounds_needed:
        best = None

    if outlook.diverges and (best is None or math.isfinite(outlook.slowdown)):
        limit = "divergence"
    else:
        limit = "kernel" if best is None else limits[best]
    if best is None:
        advice = _no_advice(frozen, error, share, outlook.diverges)
    else:
        cause = "The steps are too long" if limit == "divergence" else f"The {limit} limits convergence"
        advice = f"{cause}: with {best}, {_count(changed[best])} predicted until {_percent(share)} is left"
        if run.reached is None and math.isfinite(outlook.rounds_needed):
            advice += f" instead of {outlook.rounds_needed:.0f}"
        advice += "."
    return Diagnosis(
        limit=limit,
        sentence=f"{outlook.sentence} {advice}",
        rounds=frozen.rounds_to(error, share),
        observed=run.reached,
        change=best,
        changed=changed,
    )


def _count(rounds: int | None) -> str:
    return f"{_number(rounds)} {'is' if rounds == 1 else 'are'}"


def _number(rounds: int | None) -> str:
    return "1 round" if rounds == 1 else f"{rounds} rounds"


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"


@dataclass(frozen=True)
class _Run:
    """What was observed, in shares of the first squared error.

    Attributes
    ----------
    last : the last round. left : share after it. lowest : the smallest share in any round.
    level : the share at which run and prediction are compared: the one that is asked for, or what was left in the end.
    earliest, latest : rounds between which the run came to `level`; they differ if rounds between were not observed.
    is_reached : whether the share that is asked for was reached.
    """

    last: int
    left: float
    lowest: float
    level: float
    earliest: int
    latest: int
    is_reached: bool

    @classmethod
    def of(cls, errors: Mapping[int, float], share: float) -> _Run:
        relative = {t: errors[t] / errors[0] for t in sorted(errors)}
        last = max(relative)
        left = relative[last]
        lowest = min(relative.values())
        reached = next((t for t, value in relative.items() if value <= share), None)
        if reached is None:
            return cls(last, left, lowest, left, last, last, is_reached=False)
        before = max(t for t in relative if t < reached)
        return cls(last, left, lowest, share, before + 1, reached, is_reached=True)

    @property
    def reached(self) -> int | None:
        """The first observed round with the share that is asked for; None: there is none."""
        return self.latest if self.is_reached else None

    @property
    def converges(self) -> bool:
        """Whether the share that is asked for was reached and kept."""
        return self.is_reached and self.left <= self.level

    @property
    def grows(self) -> bool:
        """Whether the error has grown since it was lowest, other than by fluctuations of one that has converged."""
        return not self.converges and not self.left <= PACE * self.lowest

    @property
    def sentence(self) -> str:
        """What was observed, without a full stop."""
        if self.grows:
            return (
                f"The squared error grows: after {_number(self.last)} it is {self.left:.3g} times the first one, and "
                f"at its lowest it was {self.lowest:.3g} times it"
            )
        if self.is_reached:
            return f"{_percent(self.level)} of the squared error is left after {_number(self.latest)}"
        return f"{_percent(self.left)} of the squared error is left after {_number(self.last)}"


@dataclass(frozen=True)
class _Outlook:
    """The run next to its prediction.

    Attributes
    ----------
    diverges : whether the error grows, or will, as far as the run does not contradict that.
    rounds_needed : until the share is reached: observed, else extrapolated; infinite: never.
    slowdown : observed over predicted rounds, 1 if the run is not slower; infinite if it grows against the prediction.
    """

    diverges: bool
    rounds_needed: float
    slowdown: float
    sentence: str

    @classmethod
    def of(cls, frozen: RoundMap, error: Tensor, share: float, run: _Run, switched: float) -> _Outlook:
        neurons = f"{switched:.1%} of the neurons have switched"
        if frozen.diverges:
            step = float(frozen.steps[(1 - frozen.steps).abs().argmax()])
            factor = f"a round multiplies part of it by {1 - step:.3g}"
            if not _contradicts(run, frozen, error):
                return cls(True, math.inf, 1, f"{run.sentence}; at the start, {factor}.")
            text = f"{run.sentence}. With the kernel at the start, {factor}, but it has changed: {neurons}."
            return cls(False, run.latest, 1, text)
        if run.grows:
            text = f"{run.sentence}. The kernel at the start predicts convergence, but it has changed: {neurons}."
            return cls(True, math.inf, math.inf, text)

        predicted = frozen.rounds_to(error, run.level)
        if predicted is None:
            text = f"{run.sentence}, which the kernel at the start never predicts. It has changed: {neurons}."
            return cls(False, run.latest, 1, text)
        text = f"{run.sentence}, which the kernel at the start predicts after {predicted}."
        pace = run.latest / predicted
        if run.earliest > PACE * predicted + 1:
            text += f" The kernel has changed, which slows the run down: {neurons}."
        elif run.latest + 1 < predicted / PACE:
            text += f" The kernel has changed, which makes the run faster: {neurons}."
        else:
            pace = 1.0

        rounds = frozen.rounds_to(error, share)
        if run.is_reached:
            return cls(False, run.latest, max(pace, 1), text)
        return cls(False, math.inf if rounds is None else rounds * pace, max(pace, 1), text)


def _contradicts(run: _Run, frozen: RoundMap, error: Tensor) -> bool:
    """Whether a run converges, or is about to, that a frozen kernel predicts to diverge."""
    if run.converges:
        return True
    squared = frozen.errors(error, run.last)
    return not run.grows and run.left * PACE < float(squared[-1] / squared[0])


@dataclass(frozen=True)
class _Change:
    """A change of the settings: what limits convergence if it helps, what it is, and the rounds that it leads to."""

    limit: str
    words: str
    map: RoundMap


def _changes(setting: TheoremSetting, kernel: Tensor, infinite: Tensor) -> Iterator[_Change]:
    for name, limit, words in (
        ("rate", "local step size", "a local rate of {:.3g}"),
        ("steps", "number of local steps", "a number of local steps of {}"),
        ("server_rate", "server's step size", "a server's rate of {:.3g}"),
    ):
        longer = replace(setting, **{name: 2 * getattr(setting, name)})
        for changed in (longer, _shorter(setting, name, kernel)):
            if changed is not None:
                yield _Change(limit, words.format(getattr(changed, name)), changed.map(kernel))
    if setting.clients > 1:
        yield _Change("heterogeneity of clients", "the same samples dealt at random", _dealt(setting).map(kernel))
    yield _Change("width", "a very wide network", setting.map(infinite))


def _shorter(setting: TheoremSetting, name: str, kernel: Tensor) -> TheoremSetting | None:
    """A step size, or the number of steps, halved, and again while the run would diverge; None: it cannot be halved."""
    changed = None
    for _ in range(HALVINGS):
        value = getattr(changed or setting, name)
        half = value // 2 if name == "steps" else value / 2
        if not half:
            break
        changed = replace(setting, **{name: half})
        if not changed.map(kernel).diverges:
            break
    return changed


def _dealt(setting: TheoremSetting) -> TheoremSetting:
    """The same samples, dealt at random to clients that hold as many as before."""
    everything = torch.cat(list(setting.parts))
    shuffled = everything[torch.randperm(len(everything), generator=torch.Generator().manual_seed(0))]
    return replace(setting, parts=shuffled.split([len(part) for part in setting.parts]))


def _no_advice(frozen: RoundMap, error: Tensor, share: float, diverges: bool) -> str:
    if diverges:
        return "None of the changes that were tried is predicted to converge."
    values, vectors = torch.linalg.eigh(frozen.kernel)
    least = float(values[0]) if values[0] > ZERO * values[-1] else 0.0
    text = (
        f"The kernel limits convergence, with eigenvalues from {least:.3g} to {float(values[-1]):.3g}: neither other "
        "steps nor other clients nor a wider network is predicted to save rounds."
    )
    null = vectors[:, values <= ZERO * values[-1]]
    stuck = float((null.T @ error).square().sum() / error.square().sum())
    return f"{text} No step reduces the {stuck:.1%} of the squared error where they are 0." if stuck > share else text
