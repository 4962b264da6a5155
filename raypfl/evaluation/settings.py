"""Settings of evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """How results are judged.

    Attributes
    ----------
    every : rounds between evaluations of all clients; the last round is always evaluated. 0: the last round only.
    at_start : evaluate before the first round too, as round 0.
    protocols : ``local`` (each client's own test split), ``global`` (the union of all clients' test splits), ``pm_v``
        and ``pm_l`` (the union, classes weighted as the client has them), ``unseen`` (clients that are never trained),
        ``ood/POOL``, ``ood/corrupt/NAME[/SEVERITY]``, ``val`` (each client's own validation split).
    batch_size : samples a model and forward pass.
    metrics : further ones: registered names, or ``module:attribute`` of a ``raypfl.objectives.Metric`` of your own.
    metric : by which the best round is chosen, on ``val`` alone: a metric, or ``weighted``, ``worst_decile`` or ``std``
        of the objective's primary one, of the personal models if the method makes any; None: the primary one.
    mode : whether more (``max``) or less (``min``) of it is better; ``auto``: as the metric has it.
    patience : the run stops after so many evaluations in a row without a better one; None: it does all its rounds.
    """

    every: int = 5
    at_start: bool = False
    protocols: tuple[str, ...] = ("local", "global")
    batch_size: int = 512
    metrics: tuple[Any, ...] = ()
    metric: str | None = None
    mode: Literal["auto", "max", "min"] = "auto"
    patience: int | None = None
