"""Personal adapters in a frozen network, close to a global one that the server distils."""

from __future__ import annotations

import warnings
from typing import Annotated, Literal

from torch import Tensor

from raypfl.clients.clients import Clients
from raypfl.common.limits import FROM_ZERO
from raypfl.common.messages import Weighting
from raypfl.federation.method import METHODS, ServerView
from raypfl.methods.global_model.feddf import FedDF
from raypfl.methods.local_training import proximal
from raypfl.methods.personal_models.ditto import Ditto
from raypfl.models.flat import FlatModel
from raypfl.models.parts import stored_tensors


@METHODS.register("perada")
class PerAda(Ditto, FedDF):
    """Parameter-efficient personalization with a distilled global model (Xie et al. 2024, Algorithm 1).

    For a network of which only a small part is trained (``model.trained``): adapters and the output layer. A client
    trains this part twice, as in Ditto: a personal set, which minimises ``F_k(v_k) + lam/2 ||v_k - w_t||^2`` and stays
    on the client, and a copy of the received ``w_t``, which it sends. The server averages the copies and distils the
    mean of their logits into the average, as in FedDF. The trained part, with its batch-norm statistics, is sent both
    ways.

    ``v_k`` starts at the initial model, as ``w`` does. ``steps: 0`` is PerAda without distillation; if, in addition,
    the whole network is trained, it is Ditto. Apart from the personal models it is FedDF.

    Attributes
    ----------
    lam : weight of the proximal term, lambda.
    unseen_epochs : epochs of the personal set of a client that was never trained, which starts at ``w`` and minimises
        the same objective; None: `personal_epochs`.
    """

    # A client runs Ditto.train, whose super().train is FedDF's: the order of the bases decides.
    lam: Annotated[float, FROM_ZERO] = 1.0
    unseen_epochs: Annotated[int | None, FROM_ZERO] = None
    weighting: Weighting = "uniform"
    student: Literal["train", "eval"] = "eval"

    def check(self, model: FlatModel) -> None:
        if model.segments.keys() == stored_tensors(model.module).keys():
            warnings.warn(
                f"perada is for a network that is mostly frozen, but all {model.num_parameters:,} parameters of this "
                "one are trained and sent: set model.trained, such as 'adapters, output layer', or begin with the "
                "recipe perada-digits.",
                stacklevel=2,
            )

    def unseen_model(self, clients: Clients, server: ServerView) -> Tensor:
        theta = server["theta"]
        epochs = self.personal_epochs if self.unseen_epochs is None else self.unseen_epochs
        return clients.sgd(
            clients.loss, theta, penalty=proximal(self.lam), epochs=epochs, stream="unseen", anchor=theta
        )
