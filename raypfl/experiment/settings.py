"""Settings of the sections model, ray, checkpoint and tracking, which the rooms above this one do not read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from raypfl.common.conditions import needs, needs_some, unless
from raypfl.federation.settings import needs_gpus_for_clients


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The network that clients train.

    Attributes
    ----------
    name : a registered model, ``torchvision:NAME``, ``timm:NAME``, ``transformers:NAME``, or ``module:attribute`` of
        your own ``nn.Module`` class or function.
    weights : initial weights: a file (safetensors, or a state dict from ``torch.save``), or the name of torchvision's
        (``IMAGENET1K_V1``), timm's (``augreg_in21k``) or transformers' (``pretrained``) weights; None: random.
    lora : rank of the low-rank adapters in all dense layers except the output layer; 0: no adapters. With adapters,
        clients train only ``adapters, output layer``, unless `frozen` or `trained` is set.
    frozen : parts that no client trains: names, modules, globs or roles (``input layer``), separated by commas. They
        are never sent and exist once per process; batch norm in them uses its stored statistics.
    trained : the only parts that clients train (``adapters, output layer``); all others are frozen. None: all parts.
    pretrain : pool of labelled samples on which the network, without adapters and output layer, is trained before the
        first round; see docs/perada.md. Runs with the same network, data, augmentation and seed share the result,
        which is recorded in `weights`. If `weights` is set, no pretraining takes place. None: no pretraining.
    pretrain_epochs : number of passes over that pool, with Adam.
    pretrain_lr : Adam's learning rate in pretraining, which decays to 0.
    options : keyword arguments of the model; in YAML they stand next to `name`.
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

    @property
    def is_heterogeneous(self) -> bool:
        """Whether clients have networks of different architectures, which have the output layer in common."""
        return self.name == "heterogeneous"

    def needed_pools(self) -> tuple[str, ...]:
        """Return the pool for pretraining, if there is any: with `weights`, no pretraining takes place."""
        if self.pretrain is None or self.weights is not None:
            return ()
        return (self.pretrain,)


@dataclass(frozen=True, kw_only=True)
class ActorPool:
    """Client actors of one kind: their number, and what each reserves.

    Attributes
    ----------
    actors : number of client actors; None: one per group of the cohort, as far as the cluster has room. More start when
        nodes join.
    max_actors : largest number of client actors on a cluster with an autoscaler, in place of `actors`. They are
        requested at once, but no more than the cohort has groups; those without room start when nodes have joined.
    cpus_per_actor : number of CPUs that each client actor reserves.
    gpus_per_actor : number of GPUs that each client actor reserves; with 0.25, four share a GPU, each with a quarter of
        its memory. ``auto``: the smallest share whose memory suffices for a group, as measured before the run.
    accelerator : type of GPU that client actors need, by Ray's name (``A100``); None: any.
    """

    actors: Annotated[int | None, needs("engine.backend", "ray")] = None
    max_actors: Annotated[int | None, needs("engine.backend", "ray")] = None
    cpus_per_actor: Annotated[float, needs("engine.backend", "ray")] = 1.0
    gpus_per_actor: float | Literal["auto"] = 0.0
    accelerator: Annotated[str | None, needs("engine.backend", "ray")] = None


@dataclass(frozen=True, kw_only=True)
class RaySettings(ActorPool):
    """The Ray cluster, and the resources that a run reserves on it.

    Attributes
    ----------
    pools : client actors of several kinds, each with its own `actors`, `max_actors`, `cpus_per_actor`, `gpus_per_actor`
        and `accelerator`: ``[{gpus_per_actor: 0.25, accelerator: A100}, {cpus_per_actor: 2, actors: 3}]``. Earlier
        kinds are placed first. Empty: one kind, described by the settings with these names.
    mixed_devices : whether client actors may compute on devices of several types. Rounding then depends on which group
        runs on which device, so runs are not repeatable to the bit.
    address : address of a running cluster (``auto``, ``host:port``); None: ``$RAY_ADDRESS`` or, if that is not set, a
        local cluster that starts and stops with the run.
    cpus_for_server : number of CPUs that the server reserves. Adding up what clients send needs none; a method that
        trains on the server may be much faster with some.
    gpus_for_server : number of GPUs that the server reserves; it computes on a GPU if this is above 0.
    data_share : share of a GPU's memory for the data, over all actors on it; each gets a part in proportion to its
        `gpus_per_actor`, and the server one for pools in proportion to `gpus_for_server`. Larger data stay in the
        machine's memory, and each group's samples are copied.
    dashboard : whether to start Ray's dashboard with a local cluster.
    """

    pools: Annotated[tuple[ActorPool, ...], needs("engine.backend", "ray")] = ()
    mixed_devices: Annotated[bool, needs("engine.backend", "ray")] = False
    address: Annotated[str | None, needs("engine.backend", "ray")] = None
    cpus_for_server: Annotated[float, needs("engine.backend", "ray")] = 0.0
    gpus_for_server: float = 0.0
    data_share: Annotated[float, needs_gpus_for_clients(otherwise=needs_some("gpus_for_server"))] = 0.25
    dashboard: Annotated[bool, unless("address"), needs("engine.backend", "ray")] = False

    @property
    def actor_pools(self) -> tuple[ActorPool, ...]:
        """The kinds of client actors."""
        return self.pools or (self,)

    @property
    def on_gpu(self) -> bool:
        """Whether any client actor reserves a GPU, or a share of one."""
        return any(pool.gpus_per_actor != 0 for pool in self.actor_pools)

    @property
    def gpus(self) -> float:
        """The largest number of GPUs per client actor; 0 stands for ``auto``, which is measured before the run."""
        return max(0.0 if pool.gpus_per_actor == "auto" else pool.gpus_per_actor for pool in self.actor_pools)


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """What is saved so that a run can be resumed.

    Attributes
    ----------
    every : number of rounds between checkpoints; 0: only when the run stops or ends; None: 10, or the multiple of 10
        that takes two seconds where rounds are shorter.
    keep : number of checkpoints kept, the newest ones.
    location : folder of the checkpoints, or any URI that ``pyarrow.fs`` knows (``s3://...``, ``gs://...``); None: in
        the run's folder.
    """

    every: int | None = None
    keep: int = 2
    location: str | None = None


@dataclass(frozen=True, kw_only=True)
class TrackingSettings:
    """Tracking by MLflow, as commands do for every run; in Python, use ``listeners=[raypfl.MLflowListener()]``.

    Attributes
    ----------
    mlflow : whether to track runs in MLflow.
    uri : tracking URI; None: ``$MLFLOW_TRACKING_URI`` or, if that is not set, a SQLite database in the output folder.
    experiment : name of the MLflow experiment.
    system_metrics : whether MLflow measures the driver's machine: processors, memory, disk, network and, with
        ``nvidia-ml-py``, GPUs; every ten seconds, or at ``$MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL``.
    models_mb : largest size in megabytes at which the final models are saved in MLflow: the global model, and one file
        for all personal models. 0: no models.
    latent : whether commands also draw the latent space: test samples and prototypes before the first round, and after
        each round whose checkpoint was kept; and PeFLL's descriptors of all clients.
    """

    mlflow: bool = True
    uri: str | None = None
    experiment: str = "raypfl"
    system_metrics: bool = True
    models_mb: float = 500.0
    latent: bool = False
