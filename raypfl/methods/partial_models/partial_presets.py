"""Published methods that are settings of partial personalization."""

from __future__ import annotations

from typing import Literal

from raypfl.federation.method import METHODS
from raypfl.methods.partial_models.partial import PartialPersonalization


@METHODS.register("fedper")
class FedPer(PartialPersonalization):
    """A personal output layer on a shared body, trained together (Arivazhagan et al. 2019)."""


@METHODS.register("fedrep")
class FedRep(PartialPersonalization):
    """A personal output layer, trained first, on a shared representation (Collins et al. 2021, Algorithm 1).

    Attributes
    ----------
    personal_epochs : number of epochs of the output layer, with the body fixed; ten in the paper's experiments.
    """

    order: Literal["together", "personal first", "shared first"] = "personal first"
    personal_epochs: int | None = 10


@METHODS.register("fedbabu")
class FedBABU(PartialPersonalization):
    """A shared body with the initial output layer, fine-tuned for evaluation (Oh et al. 2022).

    Attributes
    ----------
    finetune_epochs : number of epochs of fine-tuning the whole network, from the averaged body and the initial output
        layer; five in Dai et al. 2023.
    """

    personal: str = ""
    frozen: str = "output layer"
    finetune_epochs: int = 5


@METHODS.register("lg-fedavg")
class LGFedAvg(PartialPersonalization):
    """A personal feature extractor and a shared output layer (Liang et al. 2020).

    The authors' code starts at FedAvg's model.
    """

    personal: str = "feature extractor"


@METHODS.register("fedbn")
class FedBN(PartialPersonalization):
    """Personal batch norm, statistics included (Li et al. 2021). In a network without batch norm it is FedAvg."""

    personal: str = "batch norm"


@METHODS.register("fedalt")
class FedAlt(PartialPersonalization):
    """Alternating training: the personal part first, then the shared part (Pillutla et al. 2022).

    Attributes
    ----------
    personal : names of the personal part; ``output layer``, ``input layer`` or ``adapters`` in the paper.
    """

    order: Literal["together", "personal first", "shared first"] = "personal first"


@METHODS.register("fedsim")
class FedSim(PartialPersonalization):
    """Simultaneous training of the personal and the shared part (Pillutla et al. 2022).

    Attributes
    ----------
    personal : ``output layer``, ``input layer`` or ``adapters`` in the paper.
    """
