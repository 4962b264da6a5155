"""What limits the convergence of a run, by what its frozen kernel predicts for other settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from raypfl.theory.flntk import Setting

WIDE = 1.5
"""Factor between observed and predicted squared error above which the frozen kernel explains nothing."""
LITTLE = 0.9
"""A change to this share of the rounds, or more, is none."""


@dataclass(frozen=True)
class Diagnosis:
    """What limits convergence, in one sentence, and the rounds that each change of the settings would take.

    Attributes
    ----------
    limit : ``width``, ``divergence``, ``kernel``, or the change that would help most.
    rounds : now. changed : by change; None: never.
    """

    limit: str
    sentence: str
    rounds: int | None
    changed: dict[str, int | None]


def diagnose(
    setting: Setting, kernel: Tensor, error: Tensor, share: float, observed: float, predicted: float, switched: float
) -> Diagnosis:
    """Diagnose a run.

    Parameters
    ----------
    kernel : H(0), ``[n, n]``. error : ``y(0) - y``, ``[n]``.
    share : of the first squared error, until which rounds are counted.
    observed, predicted : squared error in the end, in the run and with H(0) frozen.
    switched : share of neurons, over all samples, that have switched since the beginning.
    """

    def rounds(changed: Setting) -> int | None:
        return changed.map(kernel).rounds_to(error, share)

    now = rounds(setting)
    frozen = setting.map(kernel)
    changed = {name: rounds(change(setting)) for name, change in CHANGES.items()}
    if frozen.spectral_radius > 1:
        top = float(frozen.steps[-1])
        sentence = f"The steps are too long: one round multiplies part of the error by {1 - top:.3g}, which diverges."
        return Diagnosis("divergence", sentence, now, changed)
    ratio = max(observed, predicted) / max(min(observed, predicted), 1e-300)
    if ratio > WIDE and max(observed, predicted) > 1e-12 * float(error.square().sum()):
        more = "more" if observed > predicted else "less"
        sentence = (
            f"The width limits what the kernel explains: the squared error is {ratio:.3g} times {more} than with a "
            f"kernel that stays as it was, and {switched:.1%} of the neurons have switched."
        )
        return Diagnosis("width", sentence, now, changed)
    better = {name: count for name, count in changed.items() if count and now and count < LITTLE * now}
    if not better:
        values = torch.linalg.eigvalsh(kernel)
        sentence = (
            f"The kernel limits convergence: its eigenvalues reach from {float(values[0]):.3g} to "
            f"{float(values[-1]):.3g}, and neither longer steps nor more of them nor other clients help."
        )
        return Diagnosis("kernel", sentence, now, changed)
    limit = min(better, key=lambda name: better[name])
    sentence = (
        f"The {limit} limits convergence: until {share:.0%} of the squared error is left, it takes {now} rounds, and "
        f"{better[limit]} with {WITH[limit]}."
    )
    return Diagnosis(limit, sentence, now, changed)


def _dealt(setting: Setting) -> Setting:
    everything = torch.cat(list(setting.parts))
    shuffled = everything[torch.randperm(len(everything), generator=torch.Generator().manual_seed(0))]
    return replace(setting, parts=shuffled.split([len(part) for part in setting.parts]))


CHANGES: dict[str, Callable[[Setting], Setting]] = {
    "local step size": lambda s: replace(s, rate=2 * s.rate),
    "number of local steps": lambda s: replace(s, steps=2 * s.steps),
    "server's step size": lambda s: replace(s, server_rate=2 * s.server_rate),
    "heterogeneity of clients": _dealt,
}
WITH = {
    "local step size": "twice the rate",
    "number of local steps": "twice as many",
    "server's step size": "twice the rate",
    "heterogeneity of clients": "the same samples dealt at random",
}
