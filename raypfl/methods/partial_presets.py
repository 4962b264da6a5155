"""Published methods of partial personalization: what is personal in each, and in which order it is trained."""

from __future__ import annotations

from typing import Literal

from raypfl.federation.method import METHODS
from raypfl.methods.partial import PartialPersonalization


@METHODS.register("fedper")
class FedPer(PartialPersonalization):
    """A personal output layer on a shared body, trained together (Arivazhagan et al. 2019)."""


@METHODS.register("fedrep")
class FedRep(PartialPersonalization):
    """A personal output layer, trained first, on a shared representation (Collins et al. 2021, Algorithm 1).

    Attributes
    ----------
    personal_epochs : of the output layer, with the body fixed; ten in the paper's experiments.
    """

    order: Literal["together", "personal first", "shared first"] = "personal first"
    personal_epochs: int | None = 10


@METHODS.register("fedbabu")
class FedBABU(PartialPersonalization):
    """A shared body under an output layer that stays as it was drawn; fine-tuned when it is judged (Oh et al. 2022).

    Attributes
    ----------
    finetune_epochs : of the whole network, from the averaged body and the first output layer; five in Dai et al. 2023.
    """

    personal: str = ""
    frozen: str = "output layer"
    finetune_epochs: int = 5


@METHODS.register("lg-fedavg")
class LGFedAvg(PartialPersonalization):
    """Personal features under a shared output layer (Liang et al. 2020)."""

    personal: str = "feature extractor"


@METHODS.register("fedbn")
class FedBN(PartialPersonalization):
    """Batch norm is personal, with its statistics (Li et al. 2021); FedAvg in a network without."""

    personal: str = "batch norm"


@METHODS.register("fedalt")
class FedAlt(PartialPersonalization):
    """The personal part is trained first, then the shared one (Pillutla et al. 2022).

    Attributes
    ----------
    personal : in the paper ``output layer``, ``input layer`` or ``adapters``.
    """

    order: Literal["together", "personal first", "shared first"] = "personal first"


@METHODS.register("fedsim")
class FedSim(PartialPersonalization):
    """The personal and the shared part are trained together (Pillutla et al. 2022).

    Attributes
    ----------
    personal : in the paper ``output layer``, ``input layer`` or ``adapters``.
    """
