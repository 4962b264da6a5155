"""Models made by a hypernetwork from descriptors of clients' data."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from torch import Tensor

from raypfl.clients.clients import Clients
from raypfl.common.errors import ConfigError
from raypfl.common.limits import COUNT
from raypfl.common.messages import Broadcast, Each, Mean, PerClient, Scatter
from raypfl.federation.cohort import Cohort
from raypfl.federation.method import METHODS, ServerState
from raypfl.federation.task import Task
from raypfl.learning.loss import LossFunction
from raypfl.learning.objectives import Classification, Objective
from raypfl.learning.objectives.batch import Batch
from raypfl.methods.personal_models.hypernetwork import HypernetworkMethod
from raypfl.models.architectures.hypernetworks import Embedding, EmbeddingNetwork
from raypfl.models.flat import FlatModel


@METHODS.register("pefll")
class PeFLL(HypernetworkMethod):
    """Learning to learn personal models (Scott, Zakerinia and Lampert 2024, Algorithm 2).

    A client embeds a batch of its samples with their classes; the mean ``v_i`` is its descriptor, and its model is
    ``theta_i = h(v_i)``. Its step ``Delta theta_i`` is pulled back through the hypernetwork on the server, to
    ``Delta v_i``, and through the embedding network on the client, to ``Delta eta_v``. Down: the embedding network,
    ``theta_i``, ``Delta v_i``; up: ``v_i``, ``Delta theta_i``, ``Delta eta_v``. Clients keep nothing. For evaluation a
    client, also one that was never trained, gets its model by the first three of these messages, without a gradient.

    Difference from the paper: the defaults, since Algorithm 2 itself is ``server_optimizer: average`` with ``size: M``
    and ``lam_h = lam_v = 0.001``; more in ``docs/pefll.md``.

    Attributes
    ----------
    embedding : embedding network: ``linear`` or ``mlp1``, which see the classes alone, or ``cnn``, LeNet on images with
        a channel for each class.
    batch : number of samples that describe a client; None: all.
    standardise : standardise descriptors before the hypernetwork, as the authors' code does and the paper does not.
        Mean and standard deviation are those of the entries of the first client's descriptor in the first round, for
        the whole run.
    """

    objectives: ClassVar[tuple[type[Objective], ...]] = (Classification,)

    embedding: Embedding = "linear"
    batch: Annotated[int | None, COUNT] = 32
    standardise: bool = False

    def networks(self, task: Task) -> dict[str, FlatModel]:
        length = self.vector_length(task)
        if self.standardise and length < 2:
            raise ConfigError("method.standardise needs descriptors of several numbers, but method.length is 1 here.")

        shape = task.input_shape
        num_classes = task.num_classes
        embed = task.new_network("embed", lambda: EmbeddingNetwork(self.embedding, shape, num_classes, length))
        return super().networks(task) | {"embed": embed}

    def start(self, task: Task) -> ServerState:
        return super().start(task) | {"embed": task.initial("embed")}

    def round(self, server: ServerState, cohort: Cohort) -> None:
        v = cohort.run(self.describe, embed=server["embed"])["v"]
        hyper_step, v_steps = self.send_and_train(server, cohort, self._inputs(server, cohort, v))
        if self.standardise:
            _, deviation = server["standard"]
            v_steps = v_steps / deviation

        # Clients have the embedding network from the first exchange: it is not sent again.
        embed = Broadcast(server["embed"], charged=False)
        reply = cohort.run(self.pull_back, embed=embed, step=Scatter(v_steps))
        self.move(server, {"hyper": hyper_step, "embed": reply["embed_step"]}, cohort.lr)

    def personalize(self, server: ServerState, cohort: Cohort) -> None:
        v = cohort.run(self.describe, embed=server["embed"])["v"]
        self.send(server, cohort, self._inputs(server, cohort, v))

    def _inputs(self, server: ServerState, cohort: Cohort, v: Tensor) -> Tensor:
        """Return the hypernetwork's inputs for descriptors ``v[C, l]``."""
        if not self.standardise:
            return v

        if "standard" not in server:
            first = v[int(cohort.present.argmax())]  # of the first client that was not skipped
            server["standard"] = torch.stack([first.mean(), first.std()])
        mean, deviation = server["standard"]
        return (v - mean) / deviation

    def describe(self, clients: Clients, embed: Tensor) -> dict[str, Each]:
        return {"v": Each(clients.map(self._descriptor(clients), embed, self._batches(clients)))}

    def descriptors(self, clients: Clients, embed: Tensor) -> PerClient:
        """Return descriptors ``[K, l]`` of all training samples of each client, whatever `batch` is, for analysis."""
        return clients.map(self._descriptor(clients), embed)

    def pull_back(self, clients: Clients, embed: Tensor, step: Tensor) -> dict[str, Mean]:
        return {"embed_step": Mean(clients.vjp(self._descriptor(clients), embed, step, self._batches(clients)))}

    def _batches(self, clients: Clients) -> list[Batch] | None:
        """Return the samples that describe the clients, the same in all exchanges of a round; None: all."""
        return None if self.batch is None else clients.batches(self.batch, "descriptor")

    def _descriptor(self, clients: Clients) -> LossFunction:
        def mean_embedding(embed: Tensor, batch: Batch) -> Tensor:
            return batch.mean(clients.networks["embed"](embed, (batch.x, batch.y)))

        return mean_embedding
