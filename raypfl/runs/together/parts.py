"""Which runs can advance together, and whether that pays."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from raypfl.data import load_federated
from raypfl.engine.prepared import Prepared
from raypfl.experiment import Experiment
from raypfl.runs.choices.autotune import expected_executor


def parts(experiments: Sequence[Experiment]) -> list[list[int]]:
    """Return the positions of experiments, those in one list whose runs can advance together in a process.

    These differ only in their seeds, and compute on one thread of a CPU.
    """
    by_description: dict[object, list[int]] = {}
    for position, experiment in enumerate(experiments):
        key: object = position
        if _can_advance_with_others(experiment):
            key = json.dumps(_without_seed(experiment), sort_keys=True, default=str)
        by_description.setdefault(key, []).append(position)
    return list(by_description.values())


def _can_advance_with_others(experiment: Experiment) -> bool:
    engine = experiment.engine
    has_one_thread = engine.threads == 1 and engine.threads_for_server in (None, 1)
    is_on_cpu = not experiment.ray.on_gpu and experiment.ray.gpus_for_server == 0
    ray = experiment.ray
    chooses_actors = ray.actors is not None or ray.max_actors is not None or bool(ray.pools)
    return has_one_thread and is_on_cpu and engine.executor != "sequential" and not chooses_actors


def _without_seed(experiment: Experiment) -> dict[str, object]:
    values = experiment.to_dict()
    del values["seed"]
    # A comparison's runs keep their checkpoints apart.
    values["checkpoint"] = {**values["checkpoint"], "location": None}
    return values


@dataclass(frozen=True)
class Expectation:
    """What runs are expected to gain from advancing together.

    Attributes
    ----------
    pays : whether their clients train at once, so that those of several runs can train in the same steps.
    why : the reason.
    groups : groups of a cohort; so many client actors could be of use to a run of its own.
    """

    pays: bool
    why: str
    groups: int


def expected(experiment: Experiment) -> Expectation:
    """Return what runs that differ from this one in their seeds are expected to gain from advancing together."""
    try:
        data = load_federated(experiment.data, experiment.partition, seed=experiment.seed)
        prepared = Prepared(experiment, data)
        executor, why = expected_executor(prepared)
        chosen = prepared.with_settings(experiment.override([f"engine.executor={executor}"]))
        return Expectation(executor == "vectorised", why, chosen.num_groups)
    # Whatever is wrong with the data or the network, each run says it by itself.
    except Exception:
        return Expectation(False, "their data or network fail", 1)
