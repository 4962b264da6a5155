"""What a group of clients computes in an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from raypfl.clients.clients import Clients
from raypfl.clients.group import ClientGroup
from raypfl.common.messages import Each, ReadOnlyChanged, Sum, unmarked
from raypfl.evaluation.masking import Mask, masked, masked_name
from raypfl.evaluation.metric_sums import MetricSums, RunningSums
from raypfl.evaluation.protocols import OWN, WEIGHTED, EvaluationSamples, class_weights, ood_test_sets
from raypfl.learning.inference import InputChange, ModelOutputs
from raypfl.models.predictor import Predictor

PersonalModel = Callable[[Clients], Tensor | Predictor | None]


def score(
    group: ClientGroup,
    personal: PersonalModel,
    shared: Tensor | None,
    protocols: Collection[str],
    shares: list[tuple[int, int]],
    masks: Sequence[Mask] = (),
) -> dict[str, Each | Sum]:
    """The reply of a group by ``model/protocol``; it is not charged.

    Parameters
    ----------
    personal : gives a group's personal models, ``[K, P+B]``, ``[P+B]`` or a predictor, or None.
    shared : the global model ``[P+B]``, or None.
    shares : for each client ``(i, n)``: the group tests the global model on the i-th of n shares of a common test set.
    masks : by which the outputs on clients' own samples are also masked; ``personal/local/zero`` and so on.

    Returns
    -------
    ``personal/...`` and, of own samples, ``global/...``: the metrics of each client, ``Each`` of ``[K, columns]``. Of
    common samples ``global/...``: the global model's metric sums, ``Sum`` of ``[K, W]``; and ``global/alpha``: training
    samples by class, ``Each`` of ``[K, C]``.
    """
    values: dict[str, Each | Sum] = {}
    portions = [_personal(portion, personal, protocols, masks) for portion in group.portions()]
    for protocol in portions[0]:
        values[f"personal/{protocol}"] = Each(torch.cat([rows[protocol] for rows in portions]), charged=False)
    if shared is not None:
        for protocol, value in _shared(group, shared, protocols, shares, masks).items():
            values[f"global/{protocol}"] = type(value)(unmarked(value.rows), charged=False)
    return values


def _personal(
    group: ClientGroup, personal: PersonalModel, protocols: Collection[str], masks: Sequence[Mask]
) -> dict[str, Tensor]:
    try:
        models = personal(Clients(group))
    except ReadOnlyChanged:
        group = group.alone(0)
        models = personal(Clients(group))
    if models is None:
        return {}
    models = models if isinstance(models, Predictor) else unmarked(models).expand(len(group), -1)
    plainly = MetricSums(group.context.measures)
    rows: dict[str, Tensor] = {}
    for protocol in protocols:
        if protocol in OWN:
            answers = group.context.model_outputs(models, group.split(OWN[protocol]))
            sums_by_name = _own_sums(group, plainly, answers, protocol, masks)
            rows |= {name: plainly.values(sums) for name, sums in sums_by_name.items()}
        elif protocol.startswith("ood/"):
            rows[protocol] = plainly.values(_on(group, models, _parts(group, protocol), again=True))
    return rows | _everywhere(group, models, protocols)


def _everywhere(group: ClientGroup, models: Tensor | Predictor, protocols: Collection[str]) -> dict[str, Tensor]:
    """Metrics of personal models on all clients' test samples, in one pass for all protocols."""
    weighted = [protocol for protocol in WEIGHTED if protocol in protocols]
    if "global" not in protocols and not weighted:
        return {}
    metric_sums = MetricSums(group.context.measures, by_class=bool(weighted))
    sums = metric_sums.of(group.context.model_outputs(models, group.context.union("test")), len(group))
    rows = {"global": metric_sums.values(sums)} if "global" in protocols else {}
    for protocol in weighted:
        rows[protocol] = metric_sums.class_weighted(sums, class_weights(protocol, _classes(group)))
    return rows


def _shared(
    group: ClientGroup,
    theta: Tensor,
    protocols: Collection[str],
    shares: list[tuple[int, int]],
    masks: Sequence[Mask],
) -> dict[str, Each | Sum]:
    model = unmarked(theta)[None]
    plainly = MetricSums(group.context.measures)
    values: dict[str, Each | Sum] = {}
    weighted = any(protocol in WEIGHTED for protocol in protocols)
    everywhere = weighted or "global" in protocols
    for protocol, split in OWN.items():
        if protocol in protocols or (protocol == "local" and everywhere):
            metric_sums = MetricSums(group.context.measures, by_class=weighted and protocol == "local")
            answers = _answers_for_owners(group, model, group.split(split))
            masked_too = masks if protocol in protocols else ()
            sums_by_name = _own_sums(group, metric_sums, answers, protocol, masked_too)
            sums = sums_by_name.pop(protocol)
            if protocol in protocols:
                values[protocol] = Each(metric_sums.values(sums))
                values |= {name: Each(plainly.values(masked_sums)) for name, masked_sums in sums_by_name.items()}
            if protocol == "local" and everywhere:
                # The union of the clients' tests. An area under a curve is not the sum of its parts' areas.
                union = [EvaluationSamples(group.context.union("test"))]
                values["global"] = Sum(_share(group, model, union, shares) if metric_sums.whole else sums)
    for protocol in protocols:
        if protocol.startswith("ood/"):
            values[protocol] = Sum(_share(group, model, _parts(group, protocol), shares))
    if weighted:
        values["alpha"] = Each(_classes(group))
    return values


def _own_sums(
    group: ClientGroup, layout: MetricSums, answers: Iterable[ModelOutputs], protocol: str, masks: Sequence[Mask]
) -> dict[str, Tensor]:
    """Metric sums ``[K, W]`` on the clients' own samples, unmasked in `layout` and by mask, from the same outputs.

    Masked sums are not kept by class. They are empty for a client without training samples, which knows no class.
    """
    if not masks:
        return {protocol: layout.of(answers, len(group))}

    plain = RunningSums(layout, len(group))
    known = _classes(group) > 0
    by_mask = {mask: RunningSums(MetricSums(group.context.measures), len(group)) for mask in masks}
    for part in answers:
        plain.add(part)
        for mask, running in by_mask.items():
            running.add(masked(part, known, mask))

    sums = {protocol: plain.total()}
    for mask, running in by_mask.items():
        total = running.total()
        total[~known.any(1)] = 0
        sums[masked_name(protocol, mask)] = total
    return sums


def _share(
    group: ClientGroup, model: Tensor, whole: Iterable[EvaluationSamples], shares: list[tuple[int, int]]
) -> Tensor:
    """Sums ``[K, W]`` of this group's shares of a common test; it stays whole if the sums of parts do not add up."""
    if MetricSums(group.context.measures).whole:
        mine = whole if any(i == 0 for i, _ in shares) else ()
    else:
        mine = (part._replace(indices=np.concatenate([_piece(part.indices, *one) for one in shares])) for part in whole)
    sums = _on(group, model, mine)
    return torch.cat([sums, sums.new_zeros(len(group) - 1, sums.shape[1])])


def _on(group: ClientGroup, models: Tensor | Predictor, of: Iterable[EvaluationSamples], again: bool = False) -> Tensor:
    """The metric sums of models on common samples; `again` if other models will be tested on the same."""
    metric_sums = MetricSums(group.context.measures)
    total = metric_sums.empty(len(models))
    for part in of:
        change = _change(group, part, again)
        total = total + metric_sums.of(group.context.model_outputs(models, part.indices, change), len(models))
    return total


def _parts(group: ClientGroup, protocol: str) -> Iterator[EvaluationSamples]:
    return ood_test_sets(protocol, group.context.union("test"), group.context.pools.indices)


def _piece(where: np.ndarray, i: int, n: int) -> np.ndarray:
    """The i-th of n shares."""
    return where[len(where) * i // n : len(where) * (i + 1) // n]


def _change(group: ClientGroup, part: EvaluationSamples, again: bool) -> InputChange | None:
    """What corrupts the images of a part; they are computed once in this process, if there is room for them."""
    context, corruption = group.context, part.corruption
    if corruption is None:
        return None
    if again and corruption not in context.corrupted and len(part.indices):
        one, _ = context.samples.take(part.indices[:1])
        taken = sum(images.numel() for images in context.corrupted.values())
        if taken + len(part.indices) * one.numel() <= context.room:
            blocks = np.array_split(
                part.indices, range(context.evaluation_batch, len(part.indices), context.evaluation_batch)
            )
            worse = [corruption(context.samples.take(b)[0], b, context.scale) for b in blocks]
            context.corrupted[corruption] = torch.cat(worse)
    if again and corruption in context.corrupted:
        images = context.corrupted[corruption]
        return lambda x, where, first: images[first : first + len(where)]
    return lambda x, where, first: corruption(x, where, context.scale)


def _answers_for_owners(group: ClientGroup, model: Tensor, where: list[np.ndarray]) -> Iterator[ModelOutputs]:
    """The outputs of one model ``[1, P+B]`` on each client's samples ``where[k]``, all in the same batches."""
    owners = torch.from_numpy(np.repeat(np.arange(len(where)), [len(mine) for mine in where]))
    for part in group.context.model_outputs(model, np.concatenate(where)):
        mine, owners = owners.split([part.outputs.shape[1], len(owners) - part.outputs.shape[1]])
        yield part._replace(models=slice(None), owners=mine.to(part.outputs.device))


def _classes(group: ClientGroup) -> Tensor:
    """Training samples of each class, ``float64[K, C]``."""
    labels = [group.context.samples.labels_of(where) for where in group.split("train")]
    return torch.stack([torch.bincount(y, minlength=group.context.num_classes) for y in labels]).double().cpu()
