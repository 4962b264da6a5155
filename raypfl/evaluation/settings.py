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
    every : rounds between evaluations of all clients; the last round is always evaluated. 0: only the last round.
    at_start : whether to evaluate before the first round too, as round 0.
    last : results are means over this number of evaluated rounds, the last ones, where curves still swing at the end.
    protocols : ``local`` (each client's own test split), ``global`` (the union of all clients' test splits), ``pm_v``
        and ``pm_l`` (the union, with the client's class weights), ``unseen`` (clients that are never trained),
        ``ood/POOL``, ``ood/corrupt/NAME[/SEVERITY]``, ``val`` (each client's own validation split).
    masks : whether results on clients' own samples are also shown with masked outputs, in which the logits of classes
        that a client's training data lack are 0 (``zero``) or minus infinity (``exclude``). Rows ``local/zero`` and so
        on then follow the unmasked ones.
    batch_size : samples of each model in a forward pass.
    metrics : additional metrics: registered names, or ``module:attribute`` of your own
        ``raypfl.learning.objectives.Metric``.
    metric : what chooses the best round, on ``val`` only: a metric, or ``weighted``, ``worst_decile`` or ``std`` of the
        objective's primary metric, for personal models if the method has any; None: the primary metric.
    mode : whether a higher (``max``) or a lower (``min``) value is better; ``auto``: as the metric says.
    patience : the run stops after this number of evaluations in a row without a better one; None: it does all rounds.
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
    patience: Annotated[int | None, needs_among("protocols", "val")] = None
