"""Diagnosis of a run's convergence: its errors next to those that its kernels predict for it and for other settings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from raypfl.analysis.theory.flntk import TheoremSetting
from raypfl.analysis.theory.rounds import RoundMap

PACE_LIMIT = 1.5
"""Ratio of observed to predicted rounds above which a run is slower than predicted, or, inverted, faster."""

MIN_GAIN = 0.9
"""A change is worth naming if the run then takes at most this share of the rounds."""

MAX_HALVINGS = 20
"""Most times that a step size is halved in search of one that does not diverge."""

ROUNDING = 1e-12
"""Eigenvalues below this share of the largest one count as zero: they differ from it by rounding only."""


@dataclass(frozen=True)
class Diagnosis:
    """What limits convergence, and the rounds that other settings are predicted to take.

    Rounds are counted until the squared error is a share of the first one.

    Attributes
    ----------
    limit : ``divergence``; ``kernel``, if no change helps; or what to change: ``width``, ``local step size``,
        ``number of local steps``, ``server's step size``, ``heterogeneity of clients``.
    sentence : what happened, and what to change.
    rounds : number of rounds predicted with H(0) frozen; None: never.
    observed : number of rounds of the run itself; None: it did not reach the share.
    change : the key in `changed` of the change that helps most; None: no change helps.
    changed : change -> predicted number of rounds; None: never, or the run would diverge.
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
    """Diagnose a run. If it contradicts the prediction, the run counts.

    Parameters
    ----------
    kernel, infinite : H(0) and H_inf, ``[n, n]``.
    error : ``y(0) - y``, ``[n]``.
    share : share of the first squared error, until which rounds are counted.
    errors : round -> observed squared error, with round 0 and the last; rounds between may be missing.
    switched : share of neurons, over all samples, that have switched since the beginning.
    """
    frozen = setting.map(kernel)
    run = _ObservedRun.of(errors, share)
    outlook = _Outlook.of(frozen, error, share, run, switched)

    # What each change would do.
    predicted_rounds: dict[str, int | None] = {}
    expected_rounds: dict[str, float] = {}
    limits: dict[str, str] = {}
    for change in _changes(setting, kernel, infinite):
        rounds = change.map.rounds_to(error, share)
        predicted_rounds[change.name] = rounds
        limits[change.name] = change.limit
        # The slowdown by a changing kernel applies to every change but a larger width.
        slowdown = 1 if change.limit == "width" else outlook.slowdown
        if rounds is not None and math.isfinite(slowdown):
            expected_rounds[change.name] = rounds * slowdown

    best = min(expected_rounds, key=expected_rounds.__getitem__, default=None)
    if best is not None and expected_rounds[best] > MIN_GAIN * outlook.rounds_needed:
        best = None

    if outlook.diverges and (best is None or math.isfinite(outlook.slowdown)):
        limit = "divergence"
    elif best is None:
        limit = "kernel"
    else:
        limit = limits[best]

    if best is None:
        advice = _why_no_change_helps(frozen, error, share, outlook.diverges)
    else:
        # If the run reached the share, the sentence before already says how long it took.
        instead_of = math.inf if run.reached is not None else outlook.rounds_needed
        advice = _advice(limit, best, predicted_rounds[best], share, instead_of)

    return Diagnosis(
        limit=limit,
        sentence=f"{outlook.sentence} {advice}",
        rounds=frozen.rounds_to(error, share),
        observed=run.reached,
        change=best,
        changed=predicted_rounds,
    )


def _advice(limit: str, change: str, rounds: int | None, share: float, instead_of: float) -> str:
    """Say what limits convergence, and how many rounds the best change is predicted to take instead."""
    cause = "The steps are too long" if limit == "divergence" else f"The {limit} limits convergence"
    verb = "is" if rounds == 1 else "are"
    text = f"{cause}: with {change}, {_counted(rounds)} {verb} predicted until {_percent(share)} is left"
    if math.isfinite(instead_of):
        text += f" instead of {instead_of:.0f}"
    return f"{text}."


def _counted(rounds: int | None) -> str:
    return "1 round" if rounds == 1 else f"{rounds} rounds"


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"


@dataclass(frozen=True)
class _ObservedRun:
    """The errors of a run, in shares of the first squared error.

    Attributes
    ----------
    last_round : the number of the last round.
    final : the share that is left after the last round.
    lowest : the smallest share in any round.
    level : the share at which run and prediction are compared: the one to reach or, if the run did not reach it, what
        was left in the end.
    earliest, latest : rounds between which the run came to `level`; they differ if rounds between were not observed.
    is_reached : whether the run reached the share that rounds are counted to.
    """

    last_round: int
    final: float
    lowest: float
    level: float
    earliest: int
    latest: int
    is_reached: bool

    @classmethod
    def of(cls, errors: Mapping[int, float], share: float) -> _ObservedRun:
        shares = {round: errors[round] / errors[0] for round in sorted(errors)}
        last_round = max(shares)
        final = shares[last_round]
        lowest = min(shares.values())

        reached = next((round for round, value in shares.items() if value <= share), None)
        if reached is None:
            return cls(last_round, final, lowest, final, last_round, last_round, is_reached=False)
        observed_before = max(round for round in shares if round < reached)
        return cls(last_round, final, lowest, share, observed_before + 1, reached, is_reached=True)

    @property
    def reached(self) -> int | None:
        """The first observed round with the share to reach; None: there is none."""
        return self.latest if self.is_reached else None

    @property
    def converges(self) -> bool:
        """Whether the share to reach was reached, and the error did not rise above it in the end."""
        return self.is_reached and self.final <= self.level

    @property
    def grows(self) -> bool:
        """Whether the error has grown since it was lowest. After convergence, fluctuations do not count."""
        return not self.converges and not self.final <= PACE_LIMIT * self.lowest

    @property
    def sentence(self) -> str:
        """What was observed, as a sentence without its full stop."""
        if self.grows:
            return (
                f"The squared error grows: after {_counted(self.last_round)} it is {self.final:.3g} times the first "
                f"one, and at its lowest it was {self.lowest:.3g} times it"
            )
        if self.is_reached:
            return f"{_percent(self.level)} of the squared error is left after {_counted(self.latest)}"
        return f"{_percent(self.final)} of the squared error is left after {_counted(self.last_round)}"


@dataclass(frozen=True)
class _Outlook:
    """What a run is expected to do, from its errors and from the prediction with H(0) frozen.

    Attributes
    ----------
    sentence : what was observed, next to the prediction.
    rounds_needed : number of rounds until the share is reached: observed, else extrapolated; infinite: never.
    diverges : whether the error grows, or is predicted to and the run does not contradict it.
    slowdown : observed over predicted rounds, 1 if the run is not slower; infinite if the error grows although
        convergence is predicted.
    """

    sentence: str
    rounds_needed: float
    diverges: bool = False
    slowdown: float = 1

    @classmethod
    def of(cls, frozen: RoundMap, error: Tensor, share: float, run: _ObservedRun, switched: float) -> _Outlook:
        neurons = f"{switched:.1%} of the neurons have switched"
        if frozen.diverges:
            return cls._of_predicted_divergence(frozen, error, run, neurons)
        if run.grows:
            sentence = f"{run.sentence}. The kernel at the start predicts convergence, but it has changed: {neurons}."
            return cls(sentence, math.inf, diverges=True, slowdown=math.inf)

        predicted = frozen.rounds_to(error, run.level)
        if predicted is None:
            sentence = f"{run.sentence}, which the kernel at the start never predicts. It has changed: {neurons}."
            return cls(sentence, run.latest)

        sentence = f"{run.sentence}, which the kernel at the start predicts after {predicted}."
        pace = run.latest / predicted
        if run.earliest > PACE_LIMIT * predicted + 1:
            sentence += f" The kernel has changed, which slows the run down: {neurons}."
        elif run.latest + 1 < predicted / PACE_LIMIT:
            sentence += f" The kernel has changed, which makes the run faster: {neurons}."
        else:
            pace = 1.0

        slowdown = max(pace, 1)
        if run.is_reached:
            return cls(sentence, run.latest, slowdown=slowdown)
        rounds = frozen.rounds_to(error, share)
        return cls(sentence, math.inf if rounds is None else rounds * pace, slowdown=slowdown)

    @classmethod
    def _of_predicted_divergence(cls, frozen: RoundMap, error: Tensor, run: _ObservedRun, neurons: str) -> _Outlook:
        longest_step = float(frozen.steps[(1 - frozen.steps).abs().argmax()])
        factor = f"a round multiplies part of it by {1 - longest_step:.3g}"
        if _contradicts(run, frozen, error):
            sentence = f"{run.sentence}. With the kernel at the start, {factor}, but it has changed: {neurons}."
            return cls(sentence, run.latest)
        return cls(f"{run.sentence}; at the start, {factor}.", math.inf, diverges=True)


def _contradicts(run: _ObservedRun, frozen: RoundMap, error: Tensor) -> bool:
    """Return whether a run converges, or is about to, although the frozen kernel predicts that it diverges."""
    if run.converges:
        return True
    predicted_errors = frozen.errors(error, run.last_round)
    predicted_final = float(predicted_errors[-1] / predicted_errors[0])
    return not run.grows and run.final * PACE_LIMIT < predicted_final


@dataclass(frozen=True)
class _Change:
    """A change of the settings.

    Attributes
    ----------
    limit : what limits convergence if this change helps.
    name : the change in words.
    map : the map of a round after the change.
    """

    limit: str
    name: str
    map: RoundMap


def _changes(setting: TheoremSetting, kernel: Tensor, infinite: Tensor) -> Iterator[_Change]:
    """Yield each step size and the number of steps, twice as large and smaller; then other clients, another width."""
    for field, limit, description in (
        ("rate", "local step size", "a local rate of {:.3g}"),
        ("steps", "number of local steps", "a number of local steps of {}"),
        ("server_rate", "server's step size", "a server's rate of {:.3g}"),
    ):
        doubled = replace(setting, **{field: 2 * getattr(setting, field)})
        for changed in (doubled, _halved(setting, field, kernel)):
            if changed is not None:
                yield _Change(limit, description.format(getattr(changed, field)), changed.map(kernel))

    if setting.clients > 1:
        yield _Change("heterogeneity of clients", "the same samples dealt at random", _shuffled(setting).map(kernel))
    yield _Change("width", "a very wide network", setting.map(infinite))


def _halved(setting: TheoremSetting, field: str, kernel: Tensor) -> TheoremSetting | None:
    """Halve a step size or the number of steps, again and again while the run would diverge; None: it is 1 step."""
    changed = None
    for _ in range(MAX_HALVINGS):
        value = getattr(changed or setting, field)
        half = value // 2 if field == "steps" else value / 2
        if not half:
            break

        changed = replace(setting, **{field: half})
        if not changed.map(kernel).diverges:
            break
    return changed


def _shuffled(setting: TheoremSetting) -> TheoremSetting:
    """Redistribute the samples at random; every client keeps its number of them."""
    all_samples = torch.cat(list(setting.parts))
    order = torch.randperm(len(all_samples), generator=torch.Generator().manual_seed(0))
    sizes = [len(part) for part in setting.parts]
    return replace(setting, parts=all_samples[order].split(sizes))


def _why_no_change_helps(frozen: RoundMap, error: Tensor, share: float, diverges: bool) -> str:
    if diverges:
        return "None of the changes that were tried is predicted to converge."

    values, vectors = torch.linalg.eigh(frozen.kernel)
    is_null = values <= ROUNDING * values[-1]
    least = 0.0 if is_null[0] else float(values[0])
    text = (
        f"The kernel limits convergence, with eigenvalues from {least:.3g} to {float(values[-1]):.3g}: neither other "
        "steps nor other clients nor a wider network is predicted to save rounds."
    )

    stuck = float((vectors[:, is_null].T @ error).square().sum() / error.square().sum())
    if stuck <= share:
        return text
    return f"{text} No step reduces the {stuck:.1%} of the squared error where they are 0."
