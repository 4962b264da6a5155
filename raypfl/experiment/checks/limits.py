"""Ranges of settings, and contradictions between settings."""

from __future__ import annotations

import re
from math import inf
from typing import Any

from raypfl.clients.compression import Compressor
from raypfl.common.errors import did_you_mean
from raypfl.common.limits import (
    BELOW_ONE,
    CHANCE,
    COUNT,
    FROM_ZERO,
    FROM_ZERO_OR_AUTO,
    INSIDE,
    POSITIVE,
    POSITIVE_OR_INFINITE,
    SHARE,
    Limit,
)
from raypfl.devices.settings import DeviceSettings
from raypfl.evaluation.masking import mask_mistakes
from raypfl.evaluation.protocols import protocol_mistakes
from raypfl.evaluation.run_metrics import Measures
from raypfl.evaluation.settings import EvaluationSettings
from raypfl.experiment.settings import ActorPool, ModelSettings, RaySettings
from raypfl.federation.asynchronous.settings import AsynchronousSettings
from raypfl.federation.robustness import Aggregation, Attack
from raypfl.federation.settings import CohortSettings, FailureSettings
from raypfl.learning.objectives import OBJECTIVES, Metric, Objective
from raypfl.learning.privacy import PrivacySettings
from raypfl.learning.settings import TrainingSettings
from raypfl.models.architectures.heterogeneous import NETWORKS

THREADS = Limit("at least 1 and at most 1024", lambda v: 1 <= v <= 1024)
FILE_NAME = Limit(
    "letters, digits, '.', '_' or '-', at most 100 bytes, since the run's folder is named after it",
    lambda v: re.fullmatch(r"\w[\w.-]*", v) is not None and len(v.encode()) <= 100,
)
PATH = Limit(
    "a folder, not a bucket; of those, checkpoint.location and data.root may name one",
    lambda v: bool(v) and "\0" not in v and "://" not in v,
)
LOCATION = Limit(
    "a folder, or a URI with a path such as s3://bucket/folder",
    lambda v: "\0" not in v and v.strip("/:") != "" and not v.endswith("://"),
)

_SETTINGS = {
    COUNT: "rounds cohort.size training.epochs training.steps training.batch_size training.milestones "
    "training.smallest_batch evaluation.batch_size evaluation.last evaluation.patience engine.group_size ray.actors "
    "ray.max_actors checkpoint.keep failures.deaths asynchronous.buffer",
    FROM_ZERO: "seed model.lora training.weight_decay training.warmup_rounds evaluation.every "
    "ray.cpus_for_server ray.gpus_for_server checkpoint.every failures.retries tracking.models_mb privacy.noise "
    "asynchronous.exponent asynchronous.tolerance asynchronous.slope",
    FROM_ZERO_OR_AUTO: "ray.gpus_per_actor",
    POSITIVE: "cohort.deadline cohort.over_selection training.lr training.clip_norm training.gamma ray.cpus_per_actor "
    "asynchronous.window",
    POSITIVE_OR_INFINITE: "failures.loss_limit privacy.clip",
    INSIDE: "privacy.delta",
    SHARE: "asynchronous.mixing cohort.fraction training.decay",
    CHANCE: "failures.min_success_fraction ray.data_share cohort.quorum devices.partial_work",
    BELOW_ONE: "devices.dropout training.momentum",
    FILE_NAME: "name",
    PATH: "output",
    LOCATION: "checkpoint.location",
    THREADS: "engine.threads engine.threads_for_server",
}
LIMITS = {path: limit for limit, paths in _SETTINGS.items() for path in paths.split()}


def outside_limits(field: str, value: Any) -> list[str]:
    """Return a sentence for every number out of range in an experiment's `field`."""
    lines = []
    for path, limit in LIMITS.items():
        section, _, key = path.partition(".")
        if section != field:
            continue
        # An entry of ray.pools has only some of the section's settings.
        if key and not hasattr(value, key):
            continue

        setting = getattr(value, key) if key else value
        bits = 63 if path == "seed" else 31  # as tables and random draws store it
        for number in _as_tuple(setting):
            expected = limit.expected(number, bits)
            if expected:
                lines.append(f"{path} is {number!r}; it must be {expected}.")
    return lines


def _as_tuple(setting: Any) -> tuple[Any, ...]:
    if setting is None:
        return ()
    return setting if isinstance(setting, tuple) else (setting,)


def cohort_mistakes(cohort: CohortSettings, clients: int | None) -> list[str]:
    """Return a sentence for every contradiction; `clients` is the partition's number of clients, if it has one."""
    lines = []
    if cohort.size and clients and cohort.size > clients:
        lines.append(f"cohort.size is {cohort.size}, but partition.clients is {clients}; draw at most that many.")
    if cohort.over_selection < 1:
        lines.append(f"cohort.over_selection is {cohort.over_selection}; it must be at least 1, such as 1.3.")
    draws_all = cohort.fraction == 1 if cohort.size is None else cohort.size == clients
    if cohort.over_selection > 1 and draws_all:
        lines.append(
            f"cohort.over_selection is {cohort.over_selection}, which has no effect, since all clients are drawn; set "
            "cohort.size or cohort.fraction, or leave it out."
        )
    return lines


def selection_mistakes(cohort: CohortSettings, devices: DeviceSettings, privacy: PrivacySettings) -> list[str]:
    """Return a sentence for everything with which clients cannot be selected."""
    if cohort.selection is None:
        return []

    lines = []
    if cohort.size is None and cohort.fraction == 1:
        lines.append(
            "cohort.selection has no effect, since all clients are drawn; set cohort.size or cohort.fraction, or leave "
            "it out."
        )
    if privacy.noise is not None or privacy.secure_aggregation:
        lines.append(
            "cohort.selection may look at losses, which are reported without noise and masks; leave it out, or "
            "privacy.noise and privacy.secure_aggregation."
        )
    if cohort.selection.needs_time and devices.hardware is None:
        lines.append(
            "cohort.selection is by the clients' durations, but without devices.hardware there are none; set that, "
            "such as devices.hardware=lognormal."
        )
    return lines


def asynchronous_mistakes(
    asynchronous: AsynchronousSettings, devices: DeviceSettings, privacy: PrivacySettings, has_analyses: bool
) -> list[str]:
    """Return a sentence for everything that asynchronous rounds cannot do."""
    if asynchronous.buffer is None:
        return []

    impossible = {
        "devices.partial_work": devices.partial_work > 0,
        "privacy.noise": privacy.noise is not None,
        "privacy.secure_aggregation": privacy.secure_aggregation,
        "analyses": has_analyses,
    }
    lines = []
    for setting, is_set in impossible.items():
        if is_set:
            lines.append(f"{setting} is for synchronous rounds; leave it out, or asynchronous.buffer.")
    return lines


def device_mistakes(devices: DeviceSettings) -> list[str]:
    """Return a sentence for every contradiction."""
    availability = devices.availability
    if availability is not None and availability.in_seconds and devices.hardware is None:
        return [
            "devices.availability is in seconds, but without devices.hardware there is no simulated time; set that, "
            "such as devices.hardware=lognormal."
        ]
    return []


def ray_mistakes(ray: RaySettings) -> list[str]:
    """Return a sentence for every contradiction, and for every number of a pool that is out of range."""
    lines = []
    for number, pool in enumerate(ray.pools):
        for line in outside_limits("ray", pool):
            lines.append(line.replace("ray.", f"ray.pools[{number}].", 1))

    if ray.pools:
        for name, default in vars(ActorPool()).items():
            if getattr(ray, name) != default:
                lines.append(f"ray.{name} and ray.pools are both set; give each pool its own {name}.")

    for number, pool in enumerate(ray.actor_pools):
        if pool.actors is not None and pool.max_actors is not None:
            where = f"ray.pools[{number}]" if ray.pools else "ray"
            lines.append(f"{where}.actors and {where}.max_actors are both set; set one of them.")

    devices = {(pool.gpus_per_actor != 0, pool.accelerator) for pool in ray.pools}
    if len(devices) > 1 and not ray.mixed_devices:
        lines.append(
            "ray.pools has actors on devices of several types, which round differently, so results would depend on "
            "which group runs on which device; set ray.mixed_devices=true to allow that, or name one type of device."
        )
    return lines


def training_mistakes(training: TrainingSettings, rounds: int, ray: RaySettings) -> list[str]:
    """Return a sentence for every contradiction."""
    lines = []
    if training.precision == "tf32" and not ray.on_gpu and ray.gpus_for_server == 0:
        lines.append(
            "training.precision is 'tf32', which has no effect on CPUs; give client actors GPUs (ray.gpus_per_actor), "
            "or choose fp32."
        )
    if training.schedule == "step" and not training.milestones:
        lines.append(
            "training.schedule is 'step', which needs the rounds after which the rate falls; give training.milestones, "
            "such as [50, 80]."
        )
    if training.schedule == "exponential" and training.decay == 1:
        lines.append("training.schedule is 'exponential', which needs a training.decay below 1, such as 0.99.")
    if training.warmup_rounds > rounds:
        lines.append(f"training.warmup_rounds is {training.warmup_rounds}, but rounds is {rounds}.")
    return lines


def privacy_mistakes(privacy: PrivacySettings, failures: FailureSettings) -> list[str]:
    """Return a sentence for every contradiction."""
    lines = []
    if privacy.noise and privacy.clip == inf:
        lines.append(
            f"privacy.clip is .inf, but privacy.noise is {privacy.noise}, which multiplies it; give a norm such as 1."
        )
    if privacy.secure_aggregation and failures.on_client_failure == "skip":
        lines.append(
            "privacy.secure_aggregation is true, but failures.on_client_failure is 'skip': the masks of a client that "
            "is skipped would not cancel. Set it to 'raise'."
        )
    return lines


def robustness_mistakes(
    attack: Attack | None, aggregation: Aggregation | None, asynchronous: AsynchronousSettings, privacy: PrivacySettings
) -> list[str]:
    """Return a sentence for everything with which the server would need each client's message, but has no such one."""
    needing = ["attack"] if attack is not None and attack.on_messages is not None else []
    if aggregation is not None:
        needing.append("aggregation")

    impossible = {
        "asynchronous.buffer": asynchronous.buffer is not None,
        "privacy.secure_aggregation": privacy.secure_aggregation,
        "privacy.unit=client": privacy.protects_clients,
    }
    lines = []
    for setting in needing:
        for other, is_set in impossible.items():
            if is_set:
                lines.append(
                    f"{setting} needs each client's message, but with {other} the server has only their sums; leave "
                    f"{setting} or {other} out."
                )
    return lines


def architecture_mistakes(model: ModelSettings, has_analyses: bool) -> list[str]:
    """Return a sentence for everything that clients with networks of different architectures cannot have."""
    if not model.is_heterogeneous:
        return []

    lines = []
    for name in ("weights", "lora", "frozen", "trained", "pretrain"):
        if getattr(model, name):
            lines.append(f"model.{name} is for one network, but model is heterogeneous; leave it out.")
    if has_analyses:
        lines.append("analyses compare models of one network, but model is heterogeneous; leave them out.")

    networks = model.options.get("networks", NETWORKS)
    shares = model.options.get("shares")
    feature_dim = model.options.get("feature_dim")
    if not networks:
        lines.append("model.networks is empty; name one or more.")
    if shares is not None and len(shares) != len(networks):
        lines.append(
            f"model.shares has {len(shares)} numbers and model.networks {len(networks)}; give each network its share."
        )
    if shares is not None and not (all(0 <= share < inf for share in shares) and sum(shares) > 0):
        lines.append(f"model.shares is {shares}; they must be numbers of 0 or more, not all 0.")
    if feature_dim is not None and feature_dim < 1:
        lines.append(f"model.feature_dim is {feature_dim}, but must be at least 1.")
    return lines


def compression_mistakes(compression: Compressor | None, privacy: PrivacySettings) -> list[str]:
    """Return a sentence for everything that compressed updates cannot have."""
    if compression is None:
        return []
    impossible = {
        "privacy.secure_aggregation": (privacy.secure_aggregation, "masks whole numbers of 64 bits"),
        "privacy.unit=client": (privacy.protects_clients, "bounds the updates that arrive"),
    }
    return [
        f"compression changes clients' updates, but {setting} {why}; leave one out."
        for setting, (is_set, why) in impossible.items()
        if is_set
    ]


def evaluation_mistakes(evaluation: EvaluationSettings, objective: Objective | None) -> list[str]:
    """Return a sentence for every contradiction that is known before the data are read."""
    lines = [*protocol_mistakes(evaluation.protocols), *mask_mistakes(evaluation.masks, evaluation.protocols)]

    names = [metric.name for metric in evaluation.metrics]
    for name in names:
        if not name:
            lines.append(f"evaluation.metrics has a metric without a name: {name!r}.")
    columns = () if objective is None else Measures(objective).columns
    for i, name in enumerate(names):
        if name in columns or name in names[:i]:
            lines.append(f"evaluation.metrics has {name!r}, which models are judged by already; leave it out.")

    known = aggregates(objective, evaluation.metrics)
    metric = evaluation.metric
    if metric is not None and metric not in known:
        lines.append(f"evaluation.metric is {metric!r}, which is not a metric; {did_you_mean(metric, known)}")
    return lines


def aggregates(objective: Objective | None, metrics: tuple[Metric, ...]) -> set[str]:
    """Return the aggregates that a summary may have; those of all objectives if the data decide on it."""
    if objective is not None:
        return set(Measures(objective, metrics).aggregates)
    names: set[str] = set()
    for name in OBJECTIVES:
        names |= set(Measures(OBJECTIVES.get(name)(), metrics).aggregates)
    return names
