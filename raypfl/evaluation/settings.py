"""Settings of evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from raypfl.common.conditions import needs_among, needs_some
from raypfl.evaluation.masking import Mask


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """How models are evaluated.

    Attributes
    ----------
    every : number of rounds between evaluations of all clients; 0: only the last round, which is always evaluated.
    at_start : whether to evaluate before the first round too, as round 0.
    last : number of evaluated rounds, counted from the end, over which results are averaged; for curves that still
        swing at the end.
    protocols : test samples for each client's model: ``local`` (the client's own test split), ``global`` (all clients'
        test splits), ``pm_v`` and ``pm_l`` (all test splits, with the client's class weights), ``unseen`` (clients that
        are never trained), ``ood/POOL``, ``ood/corrupt/NAME[/SEVERITY]``, ``val`` (the client's own validation split).
    masks : masks of the outputs for additional results on clients' own samples: the logits of classes that are not in a
        client's training data become 0 (``zero``) or minus infinity (``exclude``). These results follow the unmasked
        ones, in rows such as ``local/zero``.
    batch_size : number of samples of each model in a forward pass.
    metrics : additional metrics: registered names, or ``module:attribute`` of your own
        ``raypfl.learning.objectives.Metric``.
    metric : score on ``val`` that chooses the best round: a metric, or ``weighted``, ``worst_decile`` or ``std`` of the
        objective's primary metric; of the personal models if the method has any. None: the primary metric.
    mode : whether higher (``max``) or lower (``min``) values of `metric` are better; ``auto``: as the metric declares.
    patience : number of evaluations in a row without a better one after which the run stops; None: it does all rounds.
    """

    every: int = 5
    at_start: bool = False
    last: Annotated[int, needs_some("every")] = 1
    protocols: tuple[str, ...] = ("local", "global")
    masks: tuple[Mask, ...] = ()
    batch_size: int = 256
    metrics: tuple[Any, ...] = ()
    metric: Annotated[str | None, needs_among("protocols", "val")] = None
    mode: Annotated[Literal["auto", "max", "min"], needs_among("protocols", "val")] = "auto"
    patience: Annotated[int | None, needs_among("protocols", "val"), needs_some("every")] = None
