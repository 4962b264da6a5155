"""Ranges of settings, and settings that contradict each other."""

from __future__ import annotations

import re
from math import inf
from typing import Any

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
from raypfl.evaluation.masking import mask_mistakes
from raypfl.evaluation.measures import Measures
from raypfl.evaluation.protocols import mistakes
from raypfl.evaluation.settings import EvaluationSettings
from raypfl.experiment.settings import ActorPool, RaySettings
from raypfl.federation.settings import CohortSettings, FailureSettings
from raypfl.learning.objectives import OBJECTIVES, Metric, Objective
from raypfl.learning.privacy import PrivacySettings
from raypfl.learning.settings import TrainingSettings

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
    "ray.max_actors checkpoint.keep failures.deaths",
    FROM_ZERO: "seed model.lora training.weight_decay training.warmup_rounds evaluation.every "
    "ray.cpus_for_server ray.gpus_for_server checkpoint.every failures.retries tracking.models_mb privacy.noise",
    FROM_ZERO_OR_AUTO: "ray.gpus_per_actor",
    POSITIVE: "training.lr training.clip_norm training.gamma ray.cpus_per_actor",
    POSITIVE_OR_INFINITE: "failures.loss_limit privacy.clip",
    INSIDE: "privacy.delta",
    SHARE: "cohort.fraction training.decay",
    CHANCE: "failures.min_success_fraction ray.data_share",
    BELOW_ONE: "cohort.dropout training.momentum",
    FILE_NAME: "name",
    PATH: "output",
    LOCATION: "checkpoint.location",
    THREADS: "engine.threads engine.threads_for_server",
}
LIMITS = {path: limit for limit, paths in _SETTINGS.items() for path in paths.split()}


def outside_limits(field: str, value: Any) -> list[str]:
    """A sentence for every number out of range in an experiment's `field`."""
    lines = []
    for path, limit in LIMITS.items():
        section, _, key = path.partition(".")
        if section == field:
            if key and not hasattr(value, key):  # a pool of actors has some of the settings of its section
                continue
            setting = getattr(value, key) if key else value
            numbers = setting if isinstance(setting, tuple) else () if setting is None else (setting,)
            lines += [f"{path} is {one!r}; it must be {limit.text}." for one in numbers if not limit.holds(one)]
            bound = 63 if path == "seed" else 31  # bits that tables and random draws have for it
            too_large = (one for one in numbers if isinstance(one, int) and one >= 2**bound)
            lines += [f"{path} is {one}; it must be below 2^{bound}." for one in too_large]
    return lines


def cohort_mistakes(cohort: CohortSettings, clients: int | None) -> list[str]:
    """A sentence for every contradiction; `clients` is how many there are, if the partition says so."""
    lines = []
    if cohort.size and clients and cohort.size > clients:
        lines.append(f"cohort.size is {cohort.size}, but partition.clients is {clients}; draw at most that many.")
    reach = cohort.availability
    if reach is not None and not (set(reach) == {"low", "high"} and 0 <= reach["low"] <= reach["high"] <= 1):
        lines.append(f"cohort.availability is {reach}; it must be {{low: p, high: q}} with 0 <= p <= q <= 1.")
    return lines


def ray_mistakes(ray: RaySettings) -> list[str]:
    """A sentence for every contradiction, and for every number of a pool that is out of range."""
    lines, none = [], ActorPool()
    for number, pool in enumerate(ray.pools):
        mistakes = outside_limits("ray", pool)
        lines += [line.replace("ray.", f"ray.pools[{number}].", 1) for line in mistakes]
    if ray.pools:
        given = [name for name, default in vars(none).items() if getattr(ray, name) != default]
        lines += [f"ray.{name} and ray.pools are both set; give each pool its own {name}." for name in given]
    for number, pool in enumerate(ray.actor_pools):
        if pool.actors is not None and pool.max_actors is not None:
            where = f"ray.pools[{number}]" if ray.pools else "ray"
            lines.append(f"{where}.actors and {where}.max_actors are both set; set one of them.")
    kinds = {(pool.gpus_per_actor != 0, pool.accelerator) for pool in ray.pools}
    if len(kinds) > 1 and not ray.mixed_devices:
        lines.append(
            "ray.pools has actors on devices of several types, on which rounding differs, so that results would depend "
            "on which group met which device; set ray.mixed_devices=true to allow that, or name one type of device."
        )
    return lines


def training_mistakes(training: TrainingSettings, rounds: int) -> list[str]:
    """A sentence for every contradiction."""
    lines = []
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
    """A sentence for every contradiction."""
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


def evaluation_mistakes(evaluation: EvaluationSettings, objective: Objective | None) -> list[str]:
    """A sentence for every contradiction, as far as is known before the data is read."""
    lines = [*mistakes(evaluation.protocols), *mask_mistakes(evaluation.masks, evaluation.protocols)]
    names = [metric.name for metric in evaluation.metrics]
    lines += [f"evaluation.metrics has a metric without a name: {one!r}." for one in names if not one]
    taken = () if objective is None else Measures(objective).columns
    lines += [
        f"evaluation.metrics has {name!r}, which models are judged by already; leave it out."
        for i, name in enumerate(names)
        if name in taken or name in names[:i]
    ]
    known = aggregates(objective, evaluation.metrics)
    if (metric := evaluation.metric) is not None and metric not in known:
        lines.append(f"evaluation.metric is {metric!r}, which is no metric; {did_you_mean(metric, known)}")
    return lines


def aggregates(objective: Objective | None, metrics: tuple[Metric, ...]) -> set[str]:
    """The aggregates that a summary may have; of any objective where the data will decide it."""
    objectives = [OBJECTIVES.get(name)() for name in OBJECTIVES] if objective is None else [objective]
    return {name for one in objectives for name in Measures(one, metrics).aggregates}
