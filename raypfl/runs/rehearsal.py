"""A round and an evaluation of a few clients before a run begins, for what cannot be told without them."""

from __future__ import annotations

import numpy as np
import torch

from raypfl.clients.worker import Worker
from raypfl.data import ClientData
from raypfl.engine.backends.inline import Inline
from raypfl.engine.evaluator import Evaluator
from raypfl.engine.setup import make_context, make_runner, make_task, pools_of_server
from raypfl.experiment import Experiment
from raypfl.federation.cohort import Cohort
from raypfl.federation.ledger import Ledger
from raypfl.storage.states import StateTable


class Rehearsal:
    """A round of one step and an evaluation, of the `size` clients with most samples, all in one group."""

    def __init__(self, experiment: Experiment, data: ClientData, device: torch.device, size: int):
        changes = [f"engine.group_size={size}", "training.steps=1", "failures.loss_limit=.inf"]
        self._experiment = experiment = experiment.override(changes)
        self._task = task = make_task(experiment, data, device)
        context = make_context(experiment, data, task, gpus=0.0)  # without room for the data
        pools = pools_of_server(experiment, data, task)
        backend = Inline(Worker(context, experiment.method), threads=experiment.engine.threads)
        self._runner = make_runner(
            experiment, task, pools, backend, StateTable(), Ledger(), lambda event: None, lambda text: None
        )
        self._server = experiment.method.start(task)

    def train(self) -> None:
        """A round."""
        cohort = Cohort(self._runner, self._largest(self._task.num_samples), (), 1, self._experiment.training.lr)
        self._experiment.method.round(self._server, cohort)
        self._runner.states.commit()

    def evaluate(self) -> None:
        """The protocols, except for those of unseen clients, which are tested in the same way."""
        protocols = [protocol for protocol in self._experiment.evaluation.protocols if protocol != "unseen"]
        clients = list(self._largest(self._task.num_test_samples))
        Evaluator(self._experiment, self._runner).evaluated(self._server, 1, clients, protocols, unseen=False)

    def _largest(self, samples: np.ndarray) -> tuple[int, ...]:
        size, unseen = self._experiment.engine.group_size, set(self._task.unseen.tolist())
        ranked = [c for c in np.argsort(-samples, kind="stable").tolist() if c not in unseen]
        return tuple(sorted(ranked[:size]))
