"""Clusters that split where clients' updates disagree."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor
from torch.nn import functional as F

from raypfl.clients.clients import Clients
from raypfl.common.limits import CHANCE, FROM_ZERO
from raypfl.common.messages import Broadcast, Each, Scatter, Weighting, per_client
from raypfl.federation.cohort import Cohort
from raypfl.federation.method import METHODS, Method, ServerState, ServerView
from raypfl.federation.task import Task
from raypfl.methods.clustered_models.models_of_clusters import best_models


@METHODS.register("cfl")
class CFL(Method):
    """Clustered federated learning (Sattler, Mueller and Samek 2020).

    Clients start in one cluster, and a cluster's model moves by the mean update of its members in the cohort. Where
    ``||mean update|| < eps1`` and ``max ||update|| > eps2``, the members have found a common stationary point and yet
    pull apart: the cluster is split in two, so that the largest cosine between updates of different halves is as small
    as it can be, and each half moves by its own mean. Only a round in which all members of a cluster take part can
    split it. Clients keep nothing; one that was never trained has the model of lowest training loss. With ``eps1 = 0``
    it is FedAvg. There is no global model.

    A cluster may split in the first round, also one of two clients, and the cut is the best one. The authors' code
    averages equally, splits clusters of three or more after round 20, and its cut, by complete linkage, often is not
    the best.

    Attributes
    ----------
    eps1, eps2 : thresholds of the norms, which depend on the network and the learning rate. The defaults are those of
        the authors' code; the paper has none.
    gamma : a cluster is split only if ``sqrt((1 - cosine) / 2)`` is above it, with the largest cosine between the
        halves; 0: always, as in the authors' code.
    weighting : weights of clients in the mean: training samples (``samples``) or equal (``uniform``).
    """

    eps1: Annotated[float, FROM_ZERO] = 0.4
    eps2: Annotated[float, FROM_ZERO] = 1.6
    gamma: Annotated[float, CHANCE] = 0.0
    weighting: Weighting = "samples"

    def start(self, task: Task) -> ServerState:
        initial = task.model.init(task.seed)
        cluster = torch.zeros(task.num_clients, dtype=torch.int64, device=initial.device)
        cluster[torch.from_numpy(task.unseen).to(cluster.device)] = -1
        return {"models": initial[None], "cluster": cluster}

    def round(self, server: ServerState, cohort: Cohort) -> None:
        models = Broadcast(server["models"], charged=cohort.task.model.size)
        chosen = cohort.rows(server["cluster"])
        updates = cohort.run(self.train, models=models, cluster=Scatter(chosen, charged=False))["update"]

        moved = list(server["models"].unbind())
        cluster = server["cluster"].clone()
        ids = torch.tensor(cohort.ids, device=cluster.device)
        weight = torch.ones_like(updates[:, 0])
        if self.weighting == "samples":
            weight = torch.from_numpy(cohort.task.num_samples).to(weight)[ids]

        present = torch.from_numpy(cohort.present).to(cluster.device)
        for number, model in enumerate(server["models"]):
            members = (present & (chosen == number)).nonzero().flatten()
            parts = [members] if len(members) else []
            if len(members) == int((server["cluster"] == number).sum()):
                parts = self._split(members, cohort.task.model.parameters(updates), weight)

            for part in parts:
                share = weight[part] / weight[part].sum()
                after = model + share @ updates[part]
                if part is parts[0]:
                    moved[number] = after
                else:
                    cluster[ids[part]] = len(moved)
                    moved.append(after)

        server["models"] = torch.stack(moved)
        server["cluster"] = cluster
        cohort.log(clusters=float(len(moved)))

    def _split(self, members: Tensor, updates: Tensor, weight: Tensor) -> list[Tensor]:
        """Return the halves of a cluster, or all of it; `members` are the rows of its clients in `updates`."""
        moves = updates[members]
        mean = (weight[members] / weight[members].sum()) @ moves
        if len(members) < 2 or mean.norm() >= self.eps1 or moves.norm(dim=1).max() <= self.eps2:
            return [members]

        directions = F.normalize(moves)
        cosines = directions @ directions.T
        second = bipartition(cosines)
        largest = cosines[~second][:, second].max()
        if torch.sqrt((1 - largest).clamp_min(0) / 2) <= self.gamma:
            return [members]
        return [members[~second], members[second]]

    def train(self, clients: Clients, models: Tensor, cluster: Tensor) -> dict[str, Each]:
        start = per_client(models[cluster])
        return {"update": Each(clients.sgd(clients.loss, start) - start)}

    def personal_model(self, clients: Clients, server: ServerView) -> Tensor:
        return per_client(server["models"][server["cluster"][list(clients.ids)]])

    def unseen_model(self, clients: Clients, server: ServerView) -> Tensor:
        return best_models(clients, server["models"])[0]


def bipartition(similarity: Tensor) -> Tensor:
    """Divide n >= 2 things in two so that the largest similarity across is smallest; return the second half, bool[n].

    Things are joined in the order of their similarity until two sets are left (single linkage): whatever joins two
    sets is the largest similarity across some division, so this is the best one. The first thing is in the first half.
    """
    count = len(similarity)
    label = torch.arange(count)
    row, column = torch.triu_indices(count, count, offset=1)
    order = similarity.cpu()[row, column].argsort(descending=True, stable=True)

    num_sets = count
    for pair in order.tolist():
        left = label[row[pair]]
        right = label[column[pair]]
        if left != right and num_sets > 2:
            label = torch.where(label == right, left, label)
            num_sets -= 1
    return (label != label[0]).to(similarity.device)
