"""Masked outputs: models judged as if they predicted only the classes that a client knows from its training data.

Which classes a client knows is worked out where the client is evaluated; nothing is sent for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import Literal, get_args

from torch import Tensor
from torch.nn import functional as F

from raypfl.common.errors import ConfigError
from raypfl.evaluation.protocols import OWN
from raypfl.learning.inference import ModelOutputs
from raypfl.learning.objectives import Objective

Mask = Literal["zero", "exclude"]
MASKS: tuple[Mask, ...] = get_args(Mask)

_LOGIT_OF_UNKNOWN: dict[Mask, float] = {"zero": 0.0, "exclude": -inf}


def masked_name(protocol: str, mask: str) -> str:
    """The protocol of masked results, as tables name it: ``local/zero``."""
    return f"{protocol}/{mask}"


def unmasked_name(protocol: str) -> str:
    """``local`` of ``local/zero``; any other protocol is returned as it is."""
    base, _, mask = protocol.partition("/")
    return base if base in OWN and mask in MASKS else protocol


def mask_of(protocol: str) -> str:
    """``zero`` of ``local/zero``; empty for unmasked results."""
    return protocol.removeprefix(unmasked_name(protocol)).removeprefix("/")


def with_masks(protocols: Iterable[str], masks: Sequence[str]) -> list[str]:
    """The protocols of the tables: each protocol on clients' own samples is followed by its masked ones."""
    names = []
    for protocol in protocols:
        names.append(protocol)
        if protocol in OWN:
            names += [masked_name(protocol, mask) for mask in masks]
    return names


def masked(answers: ModelOutputs, known: Tensor, mask: Mask) -> ModelOutputs:
    """The answers with 0 or minus infinity as the logit of each class that the model's client does not know.

    Parameters
    ----------
    answers : outputs are logits ``[k, b, outputs]``. Outputs beyond the classes are masked too: nobody knows them.
    known : ``bool[K, classes]``, of the group's clients.

    Raises
    ------
    ConfigError : if the outputs are not logits of the classes.
    """
    outputs = answers.outputs
    beyond = outputs.shape[-1] - known.shape[1]
    if outputs.dim() != 3 or beyond < 0:
        raise ConfigError(
            f"evaluation.masks needs a logit for each of the {known.shape[1]} classes, but the network's outputs for a "
            f"sample are {list(outputs.shape[2:])}; leave evaluation.masks out."
        )
    known = F.pad(known.to(outputs.device), (0, beyond))
    # [k, 1, outputs] for a client's own model; [1, b, outputs] for one model on samples of several clients.
    known_of_sample = known[answers.models, None] if answers.owners is None else known[answers.owners][None]
    if answers.weight is not None:
        # Padding counts 0 times its loss, which must be finite: the sample that pads may be of an excluded class.
        known_of_sample = known_of_sample | (answers.weight == 0)[..., None]
    return answers._replace(outputs=outputs.where(known_of_sample, _LOGIT_OF_UNKNOWN[mask]))


def mask_mistakes(masks: Sequence[str], protocols: Sequence[str]) -> list[str]:
    """A sentence for each mistake in the settings."""
    repeated = [mask for mask in dict.fromkeys(masks) if masks.count(mask) > 1]
    lines = [f"evaluation.masks has {mask!r} twice." for mask in repeated]
    if masks and not OWN.keys() & set(protocols):
        lines.append(
            f"evaluation.masks is [{', '.join(masks)}], but evaluation.protocols has none of {', '.join(OWN)}, the "
            "protocols on clients' own samples, which alone are masked; add one."
        )
    return lines


def refuse_unmaskable(masks: Sequence[str], objective: Objective) -> None:
    """Raise a ConfigError if masks are set and the objective's targets are not classes."""
    if masks and objective.targets != "classes":
        raise ConfigError(
            f"evaluation.masks is [{', '.join(masks)}], but the objective {type(objective).__name__} has no classes to "
            f"mask: its targets are {objective.targets or 'of any kind'}. Leave evaluation.masks out."
        )
