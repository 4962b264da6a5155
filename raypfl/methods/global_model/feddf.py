"""Ensemble distillation on samples that belong to no client."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from raypfl.clients.clients import Clients
from raypfl.common.limits import COUNT, FROM_ZERO, POSITIVE, SHARE
from raypfl.common.messages import Mean
from raypfl.federation.cohort import Cohort
from raypfl.federation.method import METHODS, ServerState
from raypfl.learning.objectives import Classification, MultiLabel, Objective
from raypfl.learning.objectives.batch import Batch
from raypfl.learning.optimizers import Adam
from raypfl.learning.sample_pools import Pool, PoolBatches
from raypfl.methods.global_model.fedavg import FedAvg

TEACHER_BATCH = 512
"""Number of the pool's samples that the clients' models see at a time."""


@METHODS.register("feddf")
class FedDF(FedAvg):
    """Ensemble distillation for robust model fusion (Lin et al. 2020), for clients of one network.

    Clients run FedAvg. The server then trains the average with Adam to match the cohort's models on a pool of samples,
    minimising ``KL(softmax(mean of their logits) || softmax(its logits))``. Training ignores the pool's labels. The
    clients compute the logits, and the ledger does not count them, because the server has the models. The paper also
    stops early on validation data of the server; this does not.

    If the pool has the clients' classes, each round logs the accuracy on it of the ensemble, which is the teacher, and
    of the server's model before and after distillation: ``ensemble_accuracy``, ``average_accuracy`` and
    ``student_accuracy``, in evaluation mode. A student that is worse than the average was harmed in this round.

    Attributes
    ----------
    pool : name of the pool to distil on, one of ``data.pools``.
    fraction : fraction of the pool's samples to use.
    steps : number of distillation steps in each round.
    batch_size : number of samples in each distillation step.
    lr : learning rate of Adam, which is restarted every round.
    schedule : schedule of the distillation's learning rate in a round: ``cosine`` decay to 0, or ``constant``.
    augment : augment the samples by ``data.augmentation``; the clients' models then see each mini-batch instead of each
        sample once.
    student : mode of the server's model while it distils: ``train``, in which batch norm takes the pool's statistics,
        or ``eval``. The clients' models are in evaluation mode.
    distill_rounds : number of rounds with distillation, from the first one; None: all.
    """

    # A softmax over numbers to predict, or over the positions of a text, would mean nothing.
    objectives: ClassVar[tuple[type[Objective], ...]] = (Classification, MultiLabel)

    pool: str = "auxiliary"
    fraction: Annotated[float, SHARE] = 1.0
    steps: Annotated[int, FROM_ZERO] = 500
    batch_size: Annotated[int, COUNT] = 128
    lr: Annotated[float, POSITIVE] = 1e-3
    schedule: Literal["cosine", "constant"] = "cosine"
    augment: bool = False
    student: Literal["train", "eval"] = "train"
    distill_rounds: Annotated[int | None, FROM_ZERO] = None

    def needed_pools(self) -> tuple[str, ...]:
        return (self.pool,) if self.distils(round=1) else ()

    def round(self, server: ServerState, cohort: Cohort) -> None:
        model = cohort.task.model
        reply = cohort.run(self.train, theta=server["theta"])
        self.step(server, reply["theta"], model)
        if not self.distils(cohort.round):
            return

        def distillation(p: Tensor, batch: Batch) -> Tensor:
            teachers = batch.y.log_softmax(1)
            student = model(p, batch.x).log_softmax(1)
            return batch.mean(F.kl_div(student, teachers, reduction="none", log_target=True).sum(1))

        average = server["theta"]
        batches = self.batches(cohort.pool(self.pool))
        server["theta"] = cohort.sgd(
            distillation,
            average,
            batches.with_targets(reply["logits"]),
            lr=self.lr,
            optimizer=Adam(),
            schedule=self.schedule,
            mode=self.student,
            text="distilling",
            log="distillation_loss",
        )
        log_accuracies(cohort, batches, reply["logits"], average, server["theta"])

    def train(self, clients: Clients, theta: Tensor) -> dict[str, Mean]:
        trained = clients.sgd(clients.loss, theta)
        reply = {"theta": Mean(trained, weight=clients.weights(self.weighting))}
        if self.distils(clients.round):
            batches = self.batches(clients.pool(self.pool)).once(TEACHER_BATCH)
            logits = torch.cat([clients.logits(trained, batch.x) for batch in batches], dim=1)
            # The server has every client's model, so it could compute the logits: they cost no message.
            reply["logits"] = Mean(logits, charged=False)
        return reply

    def distils(self, round: int) -> bool:
        """Return whether the server distils in this round."""
        return self.steps > 0 and (self.distill_rounds is None or round <= self.distill_rounds)

    def batches(self, pool: Pool) -> PoolBatches:
        """Return the batches of a round, the same on the server and on clients."""
        return pool.batches(self.batch_size, steps=self.steps, fraction=self.fraction, augment=self.augment)


def log_accuracies(
    cohort: Cohort, batches: PoolBatches, teacher_logits: Tensor, average: Tensor, student: Tensor
) -> None:
    """Log how many of a pool's samples the ensemble, the average and the student classify correctly.

    Nothing is logged if the pool does not have the clients' classes.

    Parameters
    ----------
    teacher_logits : the mean of the clients' logits, a row for each input of ``batches.once()``.
    average, student : the server's model ``[P+B]`` before and after distillation.
    """
    correct = {"ensemble_accuracy": 0, "average_accuracy": 0, "student_accuracy": 0}
    count = 0
    for batch in batches.once(TEACHER_BATCH):
        labels = batch.y
        if labels.dim() > 1 or labels.is_floating_point() or bool((labels < 0).any()):
            return

        ensemble_logits = teacher_logits[count : count + len(labels)]
        all_logits = (ensemble_logits, cohort.logits(average, batch.x), cohort.logits(student, batch.x))
        for name, logits in zip(correct, all_logits, strict=True):
            correct[name] += int((logits.argmax(1) == labels).sum())

        count += len(labels)
        # With augmentation, `once` yields every epoch; the first one has each sample once.
        if count >= len(batches.indices):
            break

    cohort.log(**{name: number / count for name, number in correct.items()})
