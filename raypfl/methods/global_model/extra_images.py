"""FedPTR's control: auxiliary images as further training samples."""

from __future__ import annotations

from typing import Annotated

from torch import Tensor
from torch.nn import functional as F

from raypfl.clients.clients import Clients
from raypfl.common.limits import FROM_ZERO
from raypfl.common.messages import Mean, Sum, per_client
from raypfl.federation.method import METHODS
from raypfl.learning.objectives.batch import Batch
from raypfl.methods.global_model.auxiliary import ClientImages


@METHODS.register("extra-images")
class ExtraImages(ClientImages):
    """FedProx on clients' samples and auxiliary images together, without projection (Chen et al. 2023, Appendix E).

    The images are matched as in FedPTR. All of them are in every step: the loss is that of the union, of which the
    mini-batch stands for the client's own samples. In the paper, images and samples are drawn together.

    Attributes
    ----------
    mu : weight of FedProx's proximal term.
    """

    mu: Annotated[float, FROM_ZERO] = 0.01

    def learn(self, clients: Clients, theta: Tensor, shown: int, begun: Tensor | None = None) -> dict[str, Mean | Sum]:
        sets = self.update_images(clients, theta, begun, shown)
        labels = self.labels(clients.num_classes, theta.device)

        # The images' part of the union; 0 while a client's window is not full.
        share = sets.ready.to(theta.dtype) * len(labels) / (clients.num_samples + len(labels))

        def union_loss(p: Tensor, batch: Batch, images: Tensor, share: Tensor, anchor: Tensor) -> tuple[Tensor, Tensor]:
            loss = clients.loss(p, batch)
            proximal = self.mu / 2 * (p - anchor).square().sum()
            # (1 - share) loss + share image_loss + proximal; the first of the two parts alone is reported.
            return loss, share * (F.cross_entropy(clients.model(p, images), labels) - loss) + proximal

        images = per_client(sets.images)
        trained = clients.sgd(union_loss, theta, images=images, share=per_client(share), anchor=theta)
        return {"theta": Mean(trained, weight=clients.weights(self.weighting)), **sets.reply}
