"""What a group of clients computes in an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from raypfl.clients.clients import Clients
from raypfl.clients.context import Context
from raypfl.clients.group import ClientGroup
from raypfl.common.messages import Each, ReadOnlyChanged, Sum, unmarked
from raypfl.common.transfer import to_device
from raypfl.evaluation.corruptions import Corruption
from raypfl.evaluation.inference import InputChange, ModelOutputs
from raypfl.evaluation.masking import Mask, masked, masked_name
from raypfl.evaluation.metric_sums import MetricSums, RunningSums
from raypfl.evaluation.protocols import BACKDOOR, OWN_SPLITS, WEIGHTED, EvaluationSamples, class_weights, ood_test_sets
from raypfl.learning.batches import Samples
from raypfl.models.predictor import Predictor

PersonalModels = Callable[[Clients], Tensor | Predictor | None]
"""Makes the personal models of a group: ``[K, P+B]``, ``[P+B]`` or a predictor; None: the method has none."""


def score(
    group: ClientGroup,
    personal: PersonalModels,
    shared: Tensor | None,
    protocols: Collection[str],
    shares: list[tuple[int, int]],
    masks: Sequence[Mask] = (),
) -> dict[str, Each | Sum]:
    """Return the reply of a group, by ``model/protocol``; the ledger does not charge it.

    Parameters
    ----------
    shared : the global model ``[P+B]``, or None.
    shares : for each client ``(i, n)``: the group tests the global model on the i-th of n shares of a common test set.
    masks : masks by which the outputs on clients' own samples are also tested; ``personal/local/zero`` and so on.

    Returns
    -------
    ``personal/...`` and, on own samples, ``global/...``: the metrics of each client, ``Each`` of ``[K, columns]``. On
    common samples ``global/...``: the global model's metric sums, ``Sum`` of ``[K, W]``; and ``global/alpha``: training
    samples by class, ``Each`` of ``[K, C]``.
    """
    values: dict[str, Each | Sum] = {}
    portions = [_score_personal(portion, personal, protocols, masks) for portion in group.portions()]
    for protocol in portions[0]:
        values[f"personal/{protocol}"] = Each(torch.cat([rows[protocol] for rows in portions]), charged=False)

    if shared is not None:
        for protocol, value in _score_shared(group, shared, protocols, shares, masks).items():
            values[f"global/{protocol}"] = type(value)(unmarked(value.rows), charged=False)
    return values


def _score_personal(
    group: ClientGroup, personal: PersonalModels, protocols: Collection[str], masks: Sequence[Mask]
) -> dict[str, Tensor]:
    """Return metrics of the group's personal models by protocol, ``[K, columns]`` each; empty if there are none."""
    try:
        models = personal(Clients(group))
    except ReadOnlyChanged:
        group = group.alone(0)
        models = personal(Clients(group))
    if models is None:
        return {}
    if not isinstance(models, Predictor):
        models = unmarked(models).expand(len(group), -1)

    metric_sums = group.context.metric_sums()
    rows: dict[str, Tensor] = {}
    for protocol in protocols:
        if protocol in OWN_SPLITS:
            samples, indices = _own_samples(group, protocol)
            outputs = group.context.model_outputs(models, indices, samples=samples)
            sums_by_name = _own_sums(group, metric_sums, outputs, protocol, masks)
            rows |= {name: metric_sums.values(sums) for name, sums in sums_by_name.items()}
        elif protocol.startswith("ood/"):
            sums = _common_sums(group, metric_sums, models, _ood_test_sets(group, protocol), reused=True)
            rows[protocol] = metric_sums.values(sums)
    return rows | _score_on_union(group, models, protocols)


def _score_on_union(group: ClientGroup, models: Tensor | Predictor, protocols: Collection[str]) -> dict[str, Tensor]:
    """Return metrics of personal models on all clients' test samples, in one pass for all protocols."""
    weighted_protocols = [protocol for protocol in WEIGHTED if protocol in protocols]
    if "global" not in protocols and not weighted_protocols:
        return {}

    metric_sums = group.context.metric_sums(by_class=bool(weighted_protocols))
    outputs = group.context.model_outputs(models, group.context.union("test"))
    sums = metric_sums.accumulate(outputs, len(group))
    rows = {}
    if "global" in protocols:
        rows["global"] = metric_sums.values(sums)
    for protocol in weighted_protocols:
        rows[protocol] = metric_sums.class_weighted(sums, class_weights(protocol, _class_counts(group)))
    return rows


def _score_shared(
    group: ClientGroup,
    theta: Tensor,
    protocols: Collection[str],
    shares: list[tuple[int, int]],
    masks: Sequence[Mask],
) -> dict[str, Each | Sum]:
    """Return the group's part of the global model's results, by protocol; the model is ``[P+B]``."""
    model = unmarked(theta)[None]
    plain_sums = group.context.metric_sums()
    values: dict[str, Each | Sum] = {}
    weighted = any(protocol in WEIGHTED for protocol in protocols)
    needs_union = weighted or "global" in protocols

    for protocol in OWN_SPLITS:
        is_requested = protocol in protocols
        serves_union = protocol == "local" and needs_union
        if not is_requested and not serves_union:
            continue

        metric_sums = group.context.metric_sums(by_class=weighted and protocol == "local")
        outputs = _outputs_by_client(group, model, *_own_samples(group, protocol))
        sums_by_name = _own_sums(group, metric_sums, outputs, protocol, masks if is_requested else ())
        sums = sums_by_name.pop(protocol)
        if is_requested:
            values[protocol] = Each(metric_sums.values(sums))
            values |= {name: Each(plain_sums.values(masked_sums)) for name, masked_sums in sums_by_name.items()}
        if serves_union:
            if metric_sums.needs_all_outputs:
                # The AUC of a union does not follow from those of its parts, so the union is tested by itself.
                union = [EvaluationSamples(group.context.union("test"))]
                sums = _sums_of_shares(group, metric_sums, model, union, shares)
            values["global"] = Sum(sums)

    for protocol in protocols:
        if protocol.startswith("ood/"):
            values[protocol] = Sum(_sums_of_shares(group, plain_sums, model, _ood_test_sets(group, protocol), shares))
    if weighted:
        values["alpha"] = Each(_class_counts(group))
    return values


def _own_sums(
    group: ClientGroup, layout: MetricSums, outputs: Iterable[ModelOutputs], protocol: str, masks: Sequence[Mask]
) -> dict[str, Tensor]:
    """Return metric sums ``[K, W]`` on clients' own samples, unmasked in `layout` and by mask, from the same outputs.

    Masked sums are not kept by class. They are empty for a client without training samples, which knows no class.
    """
    if not masks:
        return {protocol: layout.accumulate(outputs, len(group))}

    plain = RunningSums(layout, len(group))
    is_known = _class_counts(group) > 0
    by_mask = {mask: RunningSums(group.context.metric_sums(), len(group)) for mask in masks}
    for batch in outputs:
        plain.add(batch)
        for mask, running in by_mask.items():
            running.add(masked(batch, is_known, mask))

    sums = {protocol: plain.total()}
    for mask, running in by_mask.items():
        total = running.total()
        total[~is_known.any(1)] = 0
        sums[masked_name(protocol, mask)] = total
    return sums


def _sums_of_shares(
    group: ClientGroup,
    layout: MetricSums,
    model: Tensor,
    test_sets: Iterable[EvaluationSamples],
    shares: list[tuple[int, int]],
) -> Tensor:
    """Return metric sums ``[K, W]`` in `layout` of this group's shares of a common test.

    A metric that needs all outputs at once has no sums that add up, so the first client's group runs the whole test.
    """
    if layout.needs_all_outputs:
        has_first_client = any(i == 0 for i, _ in shares)
        samples = test_sets if has_first_client else ()
    else:
        samples = (_shares_of(test_set, shares) for test_set in test_sets)
    sums = _common_sums(group, layout, model, samples)
    # The group's sums, as the row of its first client; the others' rows are zero.
    return torch.cat([sums, sums.new_zeros(len(group) - 1, sums.shape[1])])


def _shares_of(test_set: EvaluationSamples, shares: list[tuple[int, int]]) -> EvaluationSamples:
    """Return the part of a test set that is its i-th of n shares, for each ``(i, n)``."""
    indices = test_set.indices
    count = len(indices)
    pieces = [indices[count * i // n : count * (i + 1) // n] for i, n in shares]
    return test_set._replace(indices=np.concatenate(pieces))


def _common_sums(
    group: ClientGroup,
    layout: MetricSums,
    models: Tensor | Predictor,
    test_sets: Iterable[EvaluationSamples],
    reused: bool = False,
) -> Tensor:
    """Return the metric sums of models on common samples; `reused` if other models will be tested on the same ones."""
    total = layout.empty(len(models))
    for test_set in test_sets:
        change = _input_change(group, test_set, reused)
        outputs = group.context.model_outputs(models, test_set.indices, change)
        total = total + layout.accumulate(outputs, len(models))
    return total


def _ood_test_sets(group: ClientGroup, protocol: str) -> Iterator[EvaluationSamples]:
    return ood_test_sets(protocol, group.context.union("test"), group.context.pools.indices)


def _input_change(group: ClientGroup, test_set: EvaluationSamples, reused: bool) -> InputChange | None:
    """Return a function that corrupts a test set's images; `reused` ones are corrupted once, if there is memory."""
    context = group.context
    corruption = test_set.corruption
    if corruption is None:
        return None

    if reused and corruption not in context.corrupted and len(test_set.indices):
        _corrupt_once(context, test_set, corruption)
    if reused and corruption in context.corrupted:
        images = context.corrupted[corruption]
        return lambda x, indices, first: images[first : first + len(indices)]
    return lambda x, indices, first: corruption(x, indices, context.scale)


def _corrupt_once(context: Context, test_set: EvaluationSamples, corruption: Corruption) -> None:
    """Keep the corrupted images of a test set in this process, if there is memory for them."""
    indices = test_set.indices
    first_image, _ = context.samples.take(indices[:1])
    used = sum(images.numel() for images in context.corrupted.values())
    if used + len(indices) * first_image.numel() > context.corrupted_bytes:
        return

    size = context.evaluation_batch
    batches = np.array_split(indices, range(size, len(indices), size))
    corrupted = [corruption(context.samples.take(batch)[0], batch, context.scale) for batch in batches]
    context.corrupted[corruption] = torch.cat(corrupted)


def _own_samples(group: ClientGroup, protocol: str) -> tuple[Samples | None, list[np.ndarray]]:
    """Return the samples of a protocol, and the numbers of each client's, ``int64[n]``."""
    samples = group.context.with_trigger if protocol == BACKDOOR else group.context.samples
    return samples, group.split(OWN_SPLITS[protocol])


def _outputs_by_client(
    group: ClientGroup, model: Tensor, samples: Samples | None, indices: list[np.ndarray]
) -> Iterator[ModelOutputs]:
    """Yield the outputs of one model ``[1, P+B]`` on each client's samples ``indices[k]``; clients share batches."""
    sizes = [len(client_indices) for client_indices in indices]
    owners = to_device(np.repeat(np.arange(len(indices)), sizes), group.context.model.device)
    for batch in group.context.model_outputs(model, np.concatenate(indices), samples=samples):
        size = batch.outputs.shape[1]
        batch_owners, owners = owners.split([size, len(owners) - size])
        yield batch._replace(models=slice(None), owners=batch_owners)


def _class_counts(group: ClientGroup) -> Tensor:
    """Return the number of training samples of each class, ``float64[K, C]``."""
    return group.label_counts("train").double().cpu()
