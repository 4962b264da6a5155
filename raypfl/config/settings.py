"""Sections of a description that no room below reads: the model, Ray, checkpoints, tracking."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


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
