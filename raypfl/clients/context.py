"""The context that all clients of one process share, and the fallback to simpler executors."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from raypfl.clients.compression import Compressor
from raypfl.clients.gpu_errors import gpu_failure, out_of_memory
from raypfl.common import rng
from raypfl.common.messages import unmarked
from raypfl.common.user_code import user_location, where_defined
from raypfl.devices import RequestedTraining
from raypfl.evaluation.inference import InputChange, ModelOutputs, outputs_on_own_samples, outputs_on_shared_samples
from raypfl.evaluation.metric_sums import MetricSums
from raypfl.evaluation.run_metrics import Measures
from raypfl.evaluation.settings import EvaluationSettings
from raypfl.learning.batches import Samples
from raypfl.learning.executor import Executor
from raypfl.learning.loss import LossFunction
from raypfl.learning.objectives.batch import Batch
from raypfl.learning.privacy import PrivacySettings
from raypfl.learning.recording import CudaGraphs
from raypfl.learning.sample_pools import Pools
from raypfl.learning.settings import TrainingSettings
from raypfl.learning.vectorised import Vectorised
from raypfl.models.extras import Extras
from raypfl.models.flat import FlatModel
from raypfl.models.predictor import Predictor

CORRUPTED_BYTES = 512 * 2**20
"""Default of :attr:`Context.corrupted_bytes`."""


class FallbackWarning(UserWarning):
    """Warning that a simpler executor takes over, since PyTorch cannot run a function on the chosen one."""

    BECAUSE = " torch says: "


@dataclass(eq=False)
class Context:
    """The network, the samples and the settings of one process, built once and used by all of its groups.

    Attributes
    ----------
    split : the sample numbers of one client's split, ``split(client, name) -> int64[n]``.
    networks : the method's further networks (:meth:`raypfl.Method.networks`).
    loss_limit : the largest training loss; a larger one is a failure.
    attack : the name of the attack of malicious clients; empty: there is none.
    compressor : how clients compress the updates that they send in training; None: not at all.
    sends_rows : whether the server gets each client's training messages, and not only their sums.
    evaluation_batch : the number of samples per model and forward pass in evaluation.
    scale : the value of a full pixel.
    left_out : the clients that are in no union of splits: those that are never trained, and malicious ones.
    with_trigger : the samples all with the trigger of a backdoor; None: there is no backdoor.
    corrupted_bytes : most bytes of corrupted test images on the device, which all personal models share.
    corrupted : the corrupted test images, by corruption.
    requested : the local trainings that methods ask for, in a rehearsal; None: they are not kept.
    by_architecture : the contexts of clients with each architecture, if clients have different ones. `model` is then
        the largest.
    architecture_of : the number of each client's architecture, ``int64[num_clients]``; None: all have the same network.
    """

    model: FlatModel
    executor: Executor
    samples: Samples
    split: Callable[[int, str], np.ndarray]
    num_clients: int
    num_classes: int
    training: TrainingSettings
    seed: int
    pools: Pools = field(kw_only=True)
    measures: Measures = field(default_factory=Measures)
    privacy: PrivacySettings = field(default_factory=PrivacySettings)
    networks: Mapping[str, FlatModel] = field(default_factory=dict)
    loss_limit: float = 1e6
    attack: str = ""
    compressor: Compressor | None = None
    sends_rows: bool = False
    evaluation_batch: int = EvaluationSettings.batch_size
    scale: float = 255.0
    with_trigger: Samples | None = None
    corrupted_bytes: float = CORRUPTED_BYTES
    left_out: frozenset[int] = frozenset()
    corrupted: dict[Any, Tensor] = field(default_factory=dict)
    requested: list[RequestedTraining] | None = None
    by_architecture: tuple[Context, ...] = ()
    architecture_of: np.ndarray | None = None
    _unions: dict[str, np.ndarray] = field(default_factory=dict)
    _metric_sums: dict[bool, MetricSums] = field(default_factory=dict)

    @cached_property
    def initial(self) -> Tensor:
        """The model that every client and the server begin with, ``[P+B]``."""
        return self.model.init(self.seed)

    def of(self, clients: Sequence[int]) -> Context:
        """Return the context of clients that all have the same network."""
        if self.architecture_of is None or not self.by_architecture:
            return self
        return self.by_architecture[self.architecture_of[clients[0] % len(self.architecture_of)]]

    def keys(self, purpose: str, rounds: np.ndarray, clients: Sequence[int]) -> np.ndarray:
        """Return the keys ``uint64[K]`` of the clients' random draws for this purpose in each one's round."""
        distinct_rounds = set(rounds.tolist())
        if len(distinct_rounds) == 1:
            return rng.keys(self.seed, purpose, distinct_rounds.pop(), clients)

        keys = np.empty(len(clients), np.uint64)
        for round in distinct_rounds:
            chosen = np.flatnonzero(rounds == round)
            keys[chosen] = rng.keys(self.seed, purpose, round, np.asarray(clients)[chosen])
        return keys

    def union(self, split: str) -> np.ndarray:
        """Return the union of the splits of all honest clients that are trained, ``int64[N]``."""
        if split not in self._unions:
            clients = (client for client in range(self.num_clients) if client not in self.left_out)
            self._unions[split] = np.concatenate([self.split(client, split) for client in clients])
        return self._unions[split]

    def metric_sums(self, by_class: bool = False) -> MetricSums:
        """Return the layout of metric sums, which is worked out once."""
        if by_class not in self._metric_sums:
            self._metric_sums[by_class] = MetricSums(self.measures, by_class)
        return self._metric_sums[by_class]

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Put the clients' network and the method's further ones in evaluation mode; see FlatModel.evaluating."""
        with contextlib.ExitStack() as modes:
            for network in (self.model, *self.networks.values()):
                modes.enter_context(network.evaluating())
            yield

    def model_outputs(
        self,
        models: Tensor | Predictor,
        indices: np.ndarray | Sequence[np.ndarray],
        change: InputChange | None = None,
        samples: Samples | None = None,
    ) -> Iterator[ModelOutputs]:
        """Yield the outputs of M models, ``[M, P+B]`` or a predictor's, batch by batch.

        Parameters
        ----------
        indices : the numbers of the samples: ``int64[n]``, the same for all models, or one such array per model.
        change : a change of the inputs, only if all models get the same samples; None: none.
        samples : the samples that the numbers mean; None: those of the data.
        """
        source = self.samples if samples is None else samples
        models = models if isinstance(models, Predictor) else unmarked(models)

        # The first batch is computed within `run`, which replaces an executor that cannot run the network.
        def first_and_rest(executor: Executor) -> tuple[ModelOutputs | None, Iterator[ModelOutputs]]:
            size = self.evaluation_batch
            if isinstance(indices, np.ndarray):
                batches = outputs_on_shared_samples(executor, source, models, indices, size, change)
            else:
                batches = outputs_on_own_samples(executor, source, models, indices, size)
            return next(batches, None), batches

        with self.evaluating():
            (first, rest), _ = self.run(self.executor, first_and_rest)
            if first is not None:
                yield first
                yield from rest

    def run(self, executor: Executor, work: Callable[[Executor], Any]) -> tuple[Any, Executor]:
        """Return ``work(executor)`` and the executor that computed it.

        If PyTorch cannot run the work on the executor, a simpler one takes over, with a warning.

        Raises
        ------
        RuntimeError : the error of the simplest executor, if all fail.
        """
        try:
            return work(executor), executor
        except RuntimeError as error:
            if out_of_memory(error) or gpu_failure():
                raise
            if isinstance(executor, Vectorised):
                simpler = self.one_by_one
                problem = "cannot be vectorised, so clients run one by one"
            elif executor.precision.channels_last:
                simpler = self._without_channels_last
                problem = "does not work on channels-last images, so they keep their layout"
            else:
                raise
            function = user_location(error) or "A function of this method"
            reason = str(error).partition("\n")[0]

        # Warn only if the simpler executor works; otherwise its error says more.
        result = self.run(simpler, work)
        warnings.warn(f"{function} {problem}.{FallbackWarning.BECAUSE}{reason}", FallbackWarning, stacklevel=2)
        return result

    def executor_for_padding(
        self, function: LossFunction, at: Tensor, subset: Callable[[int], Batch], extras: Extras, train: bool
    ) -> Executor:
        """Return the executor, or one that pads no batches if padding would change the results of `function`.

        ``subset(n)`` returns at most n samples of the first client, whose model is `at`.
        """
        if not isinstance(self.executor, Vectorised):
            return self.executor

        problem = self.executor.unfit_for_padding(function, at, subset(self.training.batch_size), extras, train)
        if problem is None:
            return self.executor

        loss = getattr(function, "loss", function)
        warnings.warn(f"{where_defined(loss)} {problem}", stacklevel=2)
        return self.one_by_one

    def stop_recording(self) -> bool:
        """Give up CUDA graphs, and free their memory; return whether steps were recorded."""
        stopped = False
        for context in (self, *self.by_architecture):
            executor = context.executor
            if isinstance(executor, Vectorised) and isinstance(executor.recorder, CudaGraphs):
                executor.recorder = None
                stopped = True
        return stopped

    @cached_property
    def one_by_one(self) -> Executor:
        """The executor for functions that cannot be vectorised."""
        return Executor(self.model, self.executor.precision) if isinstance(self.executor, Vectorised) else self.executor

    @cached_property
    def _without_channels_last(self) -> Executor:
        return Executor(self.model, replace(self.executor.precision, channels_last=False))
