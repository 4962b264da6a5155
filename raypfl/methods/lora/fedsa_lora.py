"""LoRA whose first factors are shared, and whose second ones are personal."""

from __future__ import annotations

from typing import ClassVar

from raypfl.federation.method import METHODS, ServerState
from raypfl.methods.partial_models.partial import PartialPersonalization


@METHODS.register("fedsa-lora")
class FedSALoRA(PartialPersonalization):
    """Adapters ``B A`` of which A is shared and B personal, both trained (Guo et al. 2025).

    There is no global model: without a client's B, which is zero at first, adapters have no effect. The authors'
    adapters have the factor alpha / r, with alpha = 16, and a dropout of 0.05.

    Attributes
    ----------
    personal : names of the personal part: B and the output layer, as in the authors' experiments on classification;
        ``lora B`` leaves the output layer shared.
    """

    needs_lora: ClassVar[bool] = True

    personal: str = "lora B, output layer"

    def global_model(self, server: ServerState) -> None:
        return None
