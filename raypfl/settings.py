"""The parts of an experiment's description that the engine reads: plain dataclasses, so the core needs no pydantic."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from raypfl.optimizers import SGD, LocalOptimizer


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Which network the clients train.

    Attributes
    ----------
    name : a registered model, or ``module:attribute`` of your own ``nn.Module`` class or function.
    weights : with which it begins: a file (safetensors, or the state dict of a ``torch.save``), or the name of
        torchvision's pretrained weights (``IMAGENET1K_V1``); None: they are drawn.
    frozen : what no client trains: names, modules, globs or words with commas between (``input layer``). It is never
        sent or kept, and exists once a process; batch norm in it normalises by the statistics it has. Or
    trained : what alone clients train, all else being frozen (``adapters, output layer``). None: all of it.
    options : its keyword arguments; in YAML they stand beside the name.
    """

    name: str = "mlp"
    weights: str | None = None
    frozen: str | None = None
    trained: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CohortSettings:
    """Who takes part in a round.

    Attributes
    ----------
    size : clients drawn a round, uniformly without replacement; None: `fraction` of all.
    fraction : share of the clients drawn a round, if `size` is None, rounded up.
    dropout : chance that a drawn client receives the round's first message and then vanishes.
    availability : None, or ``{"low": p, "high": q}``: every client has a fixed chance in [p, q] to be reachable in a
        round.
    """

    size: int | None = None
    fraction: float = 1.0
    dropout: float = 0.0
    availability: dict[str, float] | None = None


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """A client's local training, unless its method says otherwise.

    Attributes
    ----------
    epochs, steps : passes over the client's data, or SGD steps if `steps` is given (batches go on over epochs).
    batch_size : samples a step; the last batch of an epoch may be smaller.
    optimizer : ``sgd``; or another registered one, or one of your own: ``adam``, ``{name: adamw, beta2: 0.99}``,
        ``module:Name``. What it remembers starts afresh every round.
    momentum, nesterov : of SGD, as in ``torch.optim.SGD``.
    lr, weight_decay : of any optimizer, as ``torch.optim`` has them.
    clip_norm : gradient norm to which a step is clipped, per client; None: not clipped.
    schedule : learning rate over rounds: ``constant``; ``exponential`` (times `decay` a round); ``cosine`` (toward 0
        after the last round); ``step`` (times `gamma` after each round in `milestones`).
    warmup_rounds : rounds over which the rate rises linearly to its scheduled value.
    precision : ``fp32``, ``bf16`` (autocast; weights stay fp32) or ``fp64``.
    channels_last : lay image batches out channels last, where clients train one by one; the network must work in that
        layout (``x.flatten(1)``, not ``x.view(len(x), -1)``). None: if it does and is faster, as for
        ``engine.executor``.
    """

    epochs: int = 1
    steps: int | None = None
    batch_size: int = 10
    lr: float = 0.1
    optimizer: LocalOptimizer | Literal["sgd"] = "sgd"
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    clip_norm: float | None = None
    schedule: Literal["constant", "exponential", "cosine", "step"] = "constant"
    decay: float = 1.0
    milestones: tuple[int, ...] = ()
    gamma: float = 0.1
    warmup_rounds: int = 0
    precision: Literal["fp32", "bf16", "fp64"] = "fp32"
    channels_last: bool | None = None

    @property
    def local_optimizer(self) -> LocalOptimizer:
        """The optimizer with its hyperparameters."""
        if isinstance(self.optimizer, LocalOptimizer):
            return self.optimizer
        return SGD(momentum=self.momentum, nesterov=self.nesterov)


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """How results are judged.

    Attributes
    ----------
    every : rounds between evaluations of all clients; the last round is always evaluated. 0: the last round only.
    at_start : evaluate before the first round too, as round 0.
    protocols : ``local`` (each client's own test split), ``global`` (the union of all clients' test splits), ``pm_v``
        and ``pm_l`` (the union, classes weighted as the client has them), ``unseen`` (clients that are never trained),
        ``ood/POOL``, ``ood/corrupt/NAME[/SEVERITY]``, ``val`` (each client's own validation split).
    batch_size : samples a model and forward pass.
    metrics : further ones: registered names, or ``module:attribute`` of a ``raypfl.objectives.Metric`` of your own.
    metric : by which the best round is chosen, on ``val`` alone: a metric, or ``weighted``, ``worst_decile`` or ``std``
        of the objective's primary one, of the personal models if the method makes any; None: the primary one.
    mode : whether more (``max``) or less (``min``) of it is better; ``auto``: as the metric has it.
    patience : the run stops after so many evaluations in a row without a better one; None: it does all its rounds.
    """

    every: int = 5
    at_start: bool = False
    protocols: tuple[str, ...] = ("local", "global")
    batch_size: int = 512
    metrics: tuple[Any, ...] = ()
    metric: str | None = None
    mode: Literal["auto", "max", "min"] = "auto"
    patience: int | None = None


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """How the work is executed. Group size and executor may change the last bits of a result; the rest does not.

    Attributes
    ----------
    backend : ``ray``, or ``inline`` (this process, no Ray: for a breakpoint, or a machine with torch alone).
    executor : ``vectorised`` (a group's clients at once, by vmap), ``sequential`` (one by one), or ``auto``:
        the faster one, which a trial finds out once for a network and group size on a machine. A run's folder says
        which it was, and why.
    group_size : clients a group; None: from the cohort and the model.
    threads : torch threads per client actor, and inline.
    threads_for_server : torch threads of what the server computes itself; None: as many.
    """

    backend: Literal["ray", "inline"] = "ray"
    executor: Literal["auto", "vectorised", "sequential"] = "auto"
    group_size: int | None = None
    threads: int = 1
    threads_for_server: int | None = None


@dataclass(frozen=True, kw_only=True)
class RaySettings:
    """The cluster, and what of it a run takes.

    Attributes
    ----------
    address : of a running cluster (``auto``, ``host:port``); None: ``$RAY_ADDRESS`` or, without that, a local one that
        is started and stopped with the run.
    actors : client actors; None: as many as the cluster has room for, and the cohort has groups for.
    cpus_per_actor, gpus_per_actor : what each client actor reserves; fractions share a device.
    cpus_for_server, gpus_for_server : what the server reserves, which computes on a GPU if it has any of one. It needs
        neither to add up what clients send; a method that trains centrally may be much faster with them.
    data_share : share of a GPU's memory that the data may take, all actors on it together; an actor's part goes by its
        `gpus_per_actor`. Data that need more stay in the machine's memory, and each group's samples are copied.
    clients_per_actor : clients an actor is handed at a time; 1 gives one actor per client of the cohort, for cross-silo
        studies.
    dashboard : start Ray's dashboard with a local cluster.
    """

    address: str | None = None
    actors: int | None = None
    cpus_per_actor: float = 1.0
    gpus_per_actor: float = 0.0
    cpus_for_server: float = 0.0
    gpus_for_server: float = 0.0
    data_share: float = 0.25
    clients_per_actor: int | None = None
    dashboard: bool = False


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """What is kept so that a run can be resumed.

    Attributes
    ----------
    every : rounds between checkpoints; 0: only when the run stops or ends.
    keep : newest checkpoints kept.
    location : any ``pyarrow.fs`` URI (a folder, ``s3://...``, ``gs://...``); None: inside the run's folder.
    """

    every: int = 10
    keep: int = 2
    location: str | None = None


@dataclass(frozen=True, kw_only=True)
class TrackingSettings:
    """MLflow, to which the command line tracks every run; in Python, with ``listeners=[raypfl.MLflowListener()]``.

    Attributes
    ----------
    mlflow : whether to track at all.
    uri : tracking URI; None: $MLFLOW_TRACKING_URI or, without that, a SQLite store in the output folder.
    experiment : MLflow experiment name.
    system_metrics : whether MLflow measures the machine that the run is started from: processors, memory, disk, network
        and, if ``nvidia-ml-py`` is installed, GPUs; every ten seconds, or as $MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL
        says.
    models_mb : megabytes up to which the final models are put into MLflow: the global one, and in one file what the
        personal ones are made of. 0: neither.
    latent : have the command line draw the latent space too: test samples and prototypes at the start, and after rounds
        of which checkpoints were kept.
    """

    mlflow: bool = True
    uri: str | None = None
    experiment: str = "raypfl"
    system_metrics: bool = True
    models_mb: float = 500.0
    latent: bool = False


@dataclass(frozen=True, kw_only=True)
class FailureSettings:
    """What happens when a client's own work fails.

    Attributes
    ----------
    on_client_failure : ``raise`` stops the run with a sentence; ``skip`` goes on without the client and counts it.
    retries : further tries of a group, after an error or the death of its process, before its failing clients are
        singled out by one try of each alone. A mistake in the method's code, such as a TypeError or KeyError, gets
        none: it would fail again.
    min_success_fraction : share of a cohort that must succeed, else the run stops even under ``skip``.
    loss_limit : a training loss above it, or one that is not finite, counts as a failure of that client.
    """

    on_client_failure: Literal["raise", "skip"] = "raise"
    retries: int = 2
    min_success_fraction: float = 0.5
    loss_limit: float = 1e6
