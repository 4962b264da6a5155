"""Masked outputs: evaluation as if a model predicted only the classes in its client's training data.

The actor that evaluates a client finds out its classes; no message is sent for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import Literal, get_args

from torch import Tensor
from torch.nn import functional as F

from raypfl.common.errors import ConfigError
from raypfl.evaluation.inference import ModelOutputs
from raypfl.evaluation.protocols import OWN_SPLITS
from raypfl.learning.objectives import Objective

Mask = Literal["zero", "exclude"]
MASKS: tuple[Mask, ...] = get_args(Mask)

_LOGIT_OF_MASKED: dict[Mask, float] = {"zero": 0.0, "exclude": -inf}


def masked_name(protocol: str, mask: str) -> str:
    """Return the name of the protocol of masked results in tables: ``local/zero``."""
    return f"{protocol}/{mask}"


def unmasked_name(protocol: str) -> str:
    """Return ``local`` for ``local/zero``; other protocols are returned unchanged."""
    base, _, mask = protocol.partition("/")
    return base if base in OWN_SPLITS and mask in MASKS else protocol


def mask_of(protocol: str) -> str:
    """Return ``zero`` for ``local/zero``; empty for unmasked results."""
    return protocol.removeprefix(unmasked_name(protocol)).removeprefix("/")


def with_masks(protocols: Iterable[str], masks: Sequence[str]) -> list[str]:
    """Return the protocols of the tables: each one on clients' own samples is followed by its masked ones."""
    names = []
    for protocol in protocols:
        names.append(protocol)
        if protocol in OWN_SPLITS:
            names += [masked_name(protocol, mask) for mask in masks]
    return names


def masked(batch: ModelOutputs, trained_classes: Tensor, mask: Mask) -> ModelOutputs:
    """Set the logits of classes that the model's client did not train on to 0 or minus infinity.

    Parameters
    ----------
    batch : a batch whose outputs are logits ``[k, b, outputs]``. Outputs beyond the classes are masked too.
    trained_classes : whether a class is in a client's training data, ``bool[K, classes]`` for the group's clients.

    Raises
    ------
    ConfigError : if the outputs are not logits of the classes.
    """
    outputs = batch.outputs
    num_classes = trained_classes.shape[1]
    beyond = outputs.shape[-1] - num_classes
    if outputs.dim() != 3 or beyond < 0:
        raise ConfigError(
            f"evaluation.masks needs a logit for each of the {num_classes} classes, but the network's outputs for a "
            f"sample are {list(outputs.shape[2:])}; leave evaluation.masks out."
        )

    unmasked = F.pad(trained_classes.to(outputs.device), (0, beyond))
    # [k, 1, outputs] for a client's own model; [1, b, outputs] for one model on samples of several clients.
    keep = unmasked[batch.models, None] if batch.owners is None else unmasked[batch.owners][None]
    if batch.weight is not None:
        # Padding has weight 0, but 0 * inf is NaN: its class must not be masked.
        keep = keep | (batch.weight == 0)[..., None]
    return batch._replace(outputs=outputs.where(keep, _LOGIT_OF_MASKED[mask]))


def mask_mistakes(masks: Sequence[str], protocols: Sequence[str]) -> list[str]:
    """Return a sentence for each mistake in the settings."""
    repeated = [mask for mask in dict.fromkeys(masks) if masks.count(mask) > 1]
    lines = [f"evaluation.masks has {mask!r} twice." for mask in repeated]
    if masks and not OWN_SPLITS.keys() & set(protocols):
        lines.append(
            f"evaluation.masks is [{', '.join(masks)}], but only protocols on clients' own samples are masked, and "
            f"evaluation.protocols has none of them; add one of {', '.join(OWN_SPLITS)}."
        )
    return lines


def refuse_unmaskable(masks: Sequence[str], objective: Objective) -> None:
    """Raise a ConfigError if masks are set and the objective's targets are not classes."""
    if masks and objective.targets != "classes":
        raise ConfigError(
            f"evaluation.masks is [{', '.join(masks)}], but the objective {type(objective).__name__} has no classes to "
            f"mask: its targets are {objective.targets or 'of any kind'}. Leave evaluation.masks out."
        )
