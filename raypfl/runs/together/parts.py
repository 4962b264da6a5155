"""Which runs can advance together, and whether that pays."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raypfl.engine.prepared import Prepared
from raypfl.experiment import Experiment
from raypfl.runs.choices.autotune import expected_executor


def parts(experiments: Sequence[Experiment]) -> list[list[int]]:
    """Group the positions of experiments whose runs can advance together in a process.

    These differ only in their seeds, in how samples are divided among as many clients, and in numbers of training and
    method, and compute on one thread of a CPU.
    """
    by_description: dict[object, list[int]] = {}
    for position, experiment in enumerate(experiments):
        key: object = position
        if _can_advance_with_others(experiment):
            key = json.dumps(_without_differences(experiment), sort_keys=True, default=str)
        by_description.setdefault(key, []).append(position)
    return list(by_description.values())


def _can_advance_with_others(experiment: Experiment) -> bool:
    engine = experiment.engine
    ray = experiment.ray
    has_one_thread = engine.threads == 1 and engine.threads_for_server in (None, 1)
    is_on_cpu = not ray.on_gpu and ray.gpus_for_server == 0
    chooses_actors = ray.actors is not None or ray.max_actors is not None or bool(ray.pools)
    return has_one_thread and is_on_cpu and engine.executor != "sequential" and not chooses_actors


def _without_differences(experiment: Experiment) -> dict[str, object]:
    """Return the settings without those that may differ."""
    values = experiment.to_dict()
    del values["seed"]
    for section in ("training", "method"):
        values[section] = {name: _without_number(value) for name, value in values[section].items()}
    # Each run reads its own data. How clients are cut into groups depends on how many they are.
    if values["partition"].get("clients"):
        values["partition"] = values["partition"]["clients"]
    # A comparison's runs keep their checkpoints apart.
    values["checkpoint"] = {**values["checkpoint"], "location": None}
    return values


def _without_number(value: Any) -> Any:
    # Integers count something, such as steps. None is a number that is chosen elsewhere.
    return None if isinstance(value, float) else value


@dataclass(frozen=True)
class Expectation:
    """What runs are expected to gain from advancing together.

    Attributes
    ----------
    pays : whether their clients train at once, so that those of several runs can train in the same steps.
    why : the reason.
    groups : the number of groups of a cohort, which is as many client actors as a run on its own could use.
    """

    pays: bool
    why: str
    groups: int


def paying_parts(experiments: Mapping[int, Experiment]) -> list[list[int]]:
    """Return the numbers of runs, those in one list that can advance together and are expected to gain from it."""
    numbers = list(experiments)
    together: list[list[int]] = []
    for positions in parts(list(experiments.values())):
        part = [numbers[position] for position in positions]
        if len(part) > 1 and not expected(experiments[part[0]]).pays:
            together += [[number] for number in part]
        else:
            together.append(part)
    # Runs that do not advance together stay in their order, such as seed by seed.
    return sorted(together)


def expected(experiment: Experiment) -> Expectation:
    """Return what runs that differ from this one in their numbers are expected to gain from advancing together."""
    try:
        prepared = Prepared(experiment, experiment.load_data())
        executor, why = expected_executor(prepared)
        chosen = prepared.with_settings(experiment.override([f"engine.executor={executor}"]))
        return Expectation(executor == "vectorised", why, chosen.num_groups)
    # Whatever is wrong with the data or the network, each run says it by itself.
    except Exception:
        return Expectation(False, "their data or network fail", 1)
