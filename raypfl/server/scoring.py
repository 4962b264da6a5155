"""What a group of clients computes in an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from raypfl.common.messages import Each, ReadOnlyChanged, Sum, unmarked
from raypfl.evaluation.metric_sums import MetricSums
from raypfl.evaluation.protocols import OWN, WEIGHTED, Part, class_weights, parts
from raypfl.models.predictor import Predictor

if TYPE_CHECKING:
    from raypfl.clients.clients import Clients
    from raypfl.training.inference import Change

PersonalModel = Callable[["Clients"], Tensor | Predictor | None]


def score(
    clients: Clients,
    personal: PersonalModel,
    shared: Tensor | None,
    protocols: Collection[str],
    shares: list[tuple[int, int]],
) -> dict[str, Each | Sum]:
    """The reply of a group by ``model/protocol``; it is not charged.

    Parameters
    ----------
    personal : gives a group's personal models, ``[K, P+B]``, ``[P+B]`` or a predictor, or None.
    shared : the global model ``[P+B]``, or None.
    shares : for each client ``(i, n)``: the group tests the global model on the i-th of n shares of a common test set.

    Returns
    -------
    ``personal/...`` and, of own samples, ``global/...``: the metrics of each client, ``Each`` of ``[K, columns]``. Of
    common samples ``global/...``: the global model's metric sums, ``Sum`` of ``[K, W]``; and ``global/alpha``: training
    samples by class, ``Each`` of ``[K, C]``.
    """
    values: dict[str, Each | Sum] = {}
    portions = [_personal(portion, personal, protocols) for portion in clients.portions()]
    for protocol in portions[0]:
        values[f"personal/{protocol}"] = Each(torch.cat([rows[protocol] for rows in portions]).cpu(), charged=False)
    if shared is not None:
        for protocol, value in _shared(clients, shared, protocols, shares).items():
            values[f"global/{protocol}"] = type(value)(unmarked(value.rows).cpu(), charged=False)
    return values


def _personal(clients: Clients, personal: PersonalModel, protocols: Collection[str]) -> dict[str, Tensor]:
    try:
        models = personal(clients)
    except ReadOnlyChanged:
        clients = clients.alone(0)
        models = personal(clients)
    if models is None:
        return {}
    count = len(clients)
    models = models if isinstance(models, Predictor) else unmarked(models).expand(count, -1)
    plainly, rows = MetricSums(clients.context.measures), {}
    for protocol in protocols:
        if protocol in OWN:
            rows[protocol] = plainly.values(plainly.of(clients.answers(models, clients.own(OWN[protocol])), count))
        elif protocol.startswith("ood/"):
            of = parts(protocol, _everyone(clients), clients.context.pools.where)
            rows[protocol] = plainly.values(_on(clients, models, of, again=True))
    return rows | _everywhere(clients, models, protocols)


def _everywhere(clients: Clients, models: Tensor | Predictor, protocols: Collection[str]) -> dict[str, Tensor]:
    """Metrics of personal models on all clients' test samples, in one pass for all protocols."""
    weighted = [protocol for protocol in WEIGHTED if protocol in protocols]
    if "global" not in protocols and not weighted:
        return {}
    metric_sums = MetricSums(clients.context.measures, by_class=bool(weighted))
    sums = metric_sums.of(clients.answers(models, _everyone(clients)), len(clients))
    rows = {"global": metric_sums.values(sums)} if "global" in protocols else {}
    for protocol in weighted:
        rows[protocol] = metric_sums.class_weighted(sums, class_weights(protocol, _classes(clients).to(sums)))
    return rows


def _shared(
    clients: Clients, theta: Tensor, protocols: Collection[str], shares: list[tuple[int, int]]
) -> dict[str, Each | Sum]:
    model = unmarked(theta)[None]
    values: dict[str, Each | Sum] = {}
    weighted = any(protocol in WEIGHTED for protocol in protocols)
    everywhere = weighted or "global" in protocols
    for protocol, split in OWN.items():
        if protocol in protocols or (protocol == "local" and everywhere):
            metric_sums = MetricSums(clients.context.measures, by_class=weighted and protocol == "local")
            sums = metric_sums.of(clients.answers_for_owners(model, clients.own(split)), len(clients))
            if protocol in protocols:
                values[protocol] = Each(metric_sums.values(sums))
            if protocol == "local" and everywhere:
                # The union of the clients' tests. An area under a curve is not the sum of its parts' areas.
                union = [Part(_everyone(clients))]
                values["global"] = Sum(_share(clients, model, union, shares) if metric_sums.whole else sums)
    for protocol in protocols:
        if protocol.startswith("ood/"):
            values[protocol] = Sum(
                _share(clients, model, list(parts(protocol, _everyone(clients), clients.context.pools.where)), shares)
            )
    if weighted:
        values["alpha"] = Each(_classes(clients))
    return values


def _share(clients: Clients, model: Tensor, whole: list[Part], shares: list[tuple[int, int]]) -> Tensor:
    """Sums ``[K, W]`` of this group's shares of a common test; it stays whole if the sums of parts do not add up."""
    if MetricSums(clients.context.measures).whole:
        mine = whole if any(i == 0 for i, _ in shares) else []
    else:
        cuts = [[(len(part.where) * i // n, len(part.where) * (i + 1) // n) for i, n in shares] for part in whole]
        mine = [
            part._replace(where=np.concatenate([part.where[a:b] for a, b in cut]))
            for part, cut in zip(whole, cuts, strict=True)
        ]
    sums = _on(clients, model, mine)
    return torch.cat([sums, sums.new_zeros(len(clients) - 1, sums.shape[1])])


def _on(clients: Clients, models: Tensor | Predictor, of: Iterable[Part], again: bool = False) -> Tensor:
    """The metric sums of models on common samples; `again` if other models will be tested on the same."""
    metric_sums = MetricSums(clients.context.measures)
    total = metric_sums.empty(len(models))
    for part in of:
        change = _change(clients, part, again)
        total = total + metric_sums.of(clients.answers(models, part.where, change), len(models)).to(total.device)
    return total


def _change(clients: Clients, part: Part, again: bool) -> Change | None:
    if (corruption := part.corruption) is None:
        return None
    if again and (images := _kept(clients, part)) is not None:
        return lambda x, where, first: images[first : first + len(where)]
    return lambda x, where, first: corruption(x, where, clients.context.scale)


def _kept(clients: Clients, part: Part) -> Tensor | None:
    """The corrupted images of a part, computed once in this process; None if there is no room for them."""
    context, name = clients.context, part.corruption
    assert name is not None
    if name not in context.corrupted and len(part.where):
        one, _ = context.samples.take(part.where[:1])
        taken = sum(images.numel() for images in context.corrupted.values())
        if taken + len(part.where) * one.numel() > context.room:
            return None
        size = context.evaluation_batch
        blocks = [part.where[first : first + size] for first in range(0, len(part.where), size)]
        context.corrupted[name] = torch.cat([name(context.samples.take(b)[0], b, context.scale) for b in blocks])
    return context.corrupted.get(name)


def _everyone(clients: Clients) -> np.ndarray:
    return clients.context.everyone("test")


def _classes(clients: Clients) -> Tensor:
    """Training samples of each class, ``float64[K, C]``."""
    labels = [clients.context.samples.take(where)[1] for where in clients.own("train")]
    return torch.stack([torch.bincount(y, minlength=clients.num_classes) for y in labels]).double()
