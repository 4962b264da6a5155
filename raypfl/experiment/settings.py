"""Sections of a description that no room below reads: model, Ray, checkpoints, tracking."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from raypfl.common.conditions import needs, unless


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Which network the clients train.

    Attributes
    ----------
    name : a registered model, ``torchvision:NAME``, ``timm:NAME``, or ``module:attribute`` of your own ``nn.Module``
        class or function.
    weights : initial weights: a file (safetensors, or a state dict from ``torch.save``), or the name of torchvision's
        (``IMAGENET1K_V1``) or timm's pretrained weights (``augreg_in21k``); None: random.
    lora : rank of low-rank adapters in all dense layers but the output layer; 0: none. With them, clients train only
        ``adapters, output layer``, unless `frozen` or `trained` say otherwise.
    frozen : the parts that no client trains: names, modules, globs or roles (``input layer``), separated by commas.
        They are never sent, and exist once per process; batch norm in them uses its stored statistics.
    trained : the only parts that clients train (``adapters, output layer``); all others are frozen. None: all parts.
    pretrain : pool with labels, on which the network is trained before the first round, but for adapters and the output
        layer; see docs/perada.md. It is done once for all runs in which everything that it reads is the same (network,
        data, augmentation, seed), unless `weights` are given, and its result is then in `weights`. None: no such
        training.
    pretrain_epochs, pretrain_lr : passes over that pool by Adam, and its learning rate, which decays to 0.
    options : keyword arguments of the model; in YAML they are given next to the name.
    """

    name: str = "mlp"
    weights: str | None = None
    lora: int = 0
    frozen: str | None = None
    trained: str | None = None
    pretrain: str | None = None
    pretrain_epochs: Annotated[int, needs("pretrain")] = 20
    pretrain_lr: Annotated[float, needs("pretrain")] = 1e-3
    options: dict[str, Any] = field(default_factory=dict)

    def needed_pools(self) -> tuple[str, ...]:
        """The pool on which the network is pretrained, if it is: weights that are given take precedence."""
        return () if self.pretrain is None or self.weights is not None else (self.pretrain,)


@dataclass(frozen=True, kw_only=True)
class ActorPool:
    """Client actors of one kind: how many, and what each reserves.

    Attributes
    ----------
    actors : number of client actors; None: as many as the cluster has room for and the cohort has groups, which grows
        when nodes join.
    max_actors : with an autoscaler, in place of `actors`: most client actors. They are asked for at once, but for no
        more than the cohort has groups; those without room begin when nodes have joined.
    cpus_per_actor : what each client actor reserves.
    gpus_per_actor : GPUs that each client actor reserves; 0.25 lets four of them share one, each with a quarter of its
        memory. ``auto``: as small a share as one group's memory allows, which is measured before the run.
    accelerator : type of GPU, as Ray names it (``A100``), that client actors must have; None: any.
    """

    actors: Annotated[int | None, needs("engine.backend", "ray")] = None
    max_actors: Annotated[int | None, needs("engine.backend", "ray")] = None
    cpus_per_actor: float = 1.0
    gpus_per_actor: float | Literal["auto"] = 0.0
    accelerator: str | None = None


@dataclass(frozen=True, kw_only=True)
class RaySettings(ActorPool):
    """The cluster, and the resources that a run takes of it.

    Attributes
    ----------
    pools : client actors of several kinds, each with `actors`, `max_actors`, `cpus_per_actor`, `gpus_per_actor` and
        `accelerator` of its own: ``[{gpus_per_actor: 0.25, accelerator: A100}, {cpus_per_actor: 2, actors: 3}]``. The
        first ones get room first. Empty: one kind, by the settings of the same names.
    mixed_devices : whether client actors may compute on devices of several types. Rounding then depends on which group
        met which device, so runs are not repeatable to the bit.
    address : address of a running cluster (``auto``, ``host:port``); None: ``$RAY_ADDRESS`` or, if that is not set, a
        local cluster that is started and stopped with the run.
    cpus_for_server, gpus_for_server : what the server reserves. It computes on a GPU if it reserves any share of one.
        To add up what clients send it needs neither; a method that trains on the server may be much faster with them.
    data_share : share of a GPU's memory that the data may take, for all actors on it together; each gets a part by its
        `gpus_per_actor`. Larger data stay in the machine's memory, and each group's samples are copied.
    dashboard : whether to start Ray's dashboard with a local cluster.
    """

    pools: Annotated[tuple[ActorPool, ...], needs("engine.backend", "ray")] = ()
    mixed_devices: Annotated[bool, needs("engine.backend", "ray")] = False
    address: str | None = None
    cpus_for_server: float = 0.0
    gpus_for_server: float = 0.0
    data_share: float = 0.25
    dashboard: Annotated[bool, unless("address")] = False

    @property
    def actor_pools(self) -> tuple[ActorPool, ...]:
        """The client actors by kind."""
        return self.pools or (self,)

    @property
    def on_gpu(self) -> bool:
        """Whether client actors have a GPU, or a share of one."""
        return any(pool.gpus_per_actor != 0 for pool in self.actor_pools)

    @property
    def gpus(self) -> float:
        """The most that a client actor has; 0 where that is still to be measured."""
        return max(0.0 if pool.gpus_per_actor == "auto" else pool.gpus_per_actor for pool in self.actor_pools)


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """What is saved so that a run can be resumed.

    Attributes
    ----------
    every : rounds between checkpoints; 0: only when the run stops or ends.
    keep : newest checkpoints kept.
    location : a folder, or any URI that ``pyarrow.fs`` knows (``s3://...``, ``gs://...``); None: in the run's folder.
    """

    every: int = 10
    keep: int = 2
    location: str | None = None


@dataclass(frozen=True, kw_only=True)
class TrackingSettings:
    """MLflow, to which the command line tracks every run; in Python, with ``listeners=[raypfl.MLflowListener()]``.

    Attributes
    ----------
    mlflow : whether to track runs.
    uri : tracking URI; None: ``$MLFLOW_TRACKING_URI`` or, if that is not set, a SQLite database in the output folder.
    experiment : name of the MLflow experiment.
    system_metrics : whether MLflow measures the driver's machine: processors, memory, disk, network and, with
        ``nvidia-ml-py``, GPUs; every ten seconds, or at ``$MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL``.
    models_mb : largest size in megabytes at which the final models are saved in MLflow: the global model, and one file
        for all personal ones. 0: no models.
    latent : whether the command line also draws the latent space: test samples and prototypes before the first round,
        and after each round of which a checkpoint was kept; and PeFLL's descriptors of all clients.
    """

    mlflow: bool = True
    uri: str | None = None
    experiment: str = "raypfl"
    system_metrics: bool = True
    models_mb: float = 500.0
    latent: bool = False
