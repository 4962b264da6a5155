"""Where a setting is that was looked for elsewhere, or under the name that another library gives it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from raypfl.common.errors import RaypflError
from raypfl.common.registry import Registry
from raypfl.experiment.sections import COMPONENTS, SECTIONS

_ELSEWHERE = {
    "algorithm": "method",
    "architecture": "model",
    "batchsize": "training.batch_size",
    "client_fraction": "cohort.fraction",
    "clients_per_round": "cohort.size",
    "communication_rounds": "rounds",
    "cuda": "ray.gpus_per_actor=1",
    "dataset": "data",
    "device": "ray.gpus_per_actor=1",
    "dirichlet_alpha": "partition.alpha",
    "distribution": "partition",
    "epsilon": "privacy.noise",
    "global_rounds": "rounds",
    "gpu": "ray.gpus_per_actor=1",
    "gpus": "ray.gpus_per_actor=1",
    "learning_rate": "training.lr",
    "l2_norm_clip": "privacy.clip",
    "local_epochs": "training.epochs",
    "local_steps": "training.steps",
    "loss": "objective",
    "max_grad_norm": "training.clip_norm",
    "n_clients": "partition.clients",
    "network": "model",
    "noise_multiplier": "privacy.noise",
    "num_clients": "partition.clients",
    "num_epochs": "training.epochs",
    "num_gpus": "ray.gpus_per_actor=1",
    "num_rounds": "rounds",
    "num_workers": "ray.actors",
    "out_dir": "output",
    "output_dir": "output",
    "participation": "cohort.fraction",
    "sample_fraction": "cohort.fraction",
    "strategy": "method",
    "workers": "ray.actors",
}
"""What other libraries call a setting."""

_NO_OPTIONS = {"config", "input_shape", "member", "name", "num_classes", "options"}
_NAMED = 5
"""Components that a hint names at most."""


def suggestion(key: str, section: str = "") -> str:
    """``"did you mean 'training.lr'?"`` for a key that a section lacks; empty if nothing else has it.

    Settings come first, then other components of the section (``"mlp has it."``), then components of other sections.
    """
    if places := list(dict.fromkeys(_settings(key))):
        return f"did you mean {' or '.join(map(repr, places))}?"
    if takers := _takers(tuple(section.split(".")), key):
        more = f" and {len(takers) - _NAMED} more" if len(takers) > _NAMED else ""
        return f"{', '.join(takers[:_NAMED])}{more} {'has' if len(takers) == 1 else 'have'} it."
    places = [".".join((*path, key)) for path in COMPONENTS if _takers(path, key)]
    return f"did you mean {' or '.join(map(repr, places))}?" if places else ""


def _settings(key: str) -> Iterator[str]:
    if key in _ELSEWHERE:
        yield _ELSEWHERE[key]
    for section, kind in SECTIONS.items():
        if key in _parameters(kind):
            yield f"{section}.{key}"


@lru_cache
def _takers(path: tuple[str, ...], key: str) -> tuple[str, ...]:
    """The components registered for a section that have this option."""
    if path not in COMPONENTS:
        return ()
    registry, _ = COMPONENTS[path]
    return tuple(name for name in registry if ":" not in name and key in _parameters(_loaded(registry, name)))


def _loaded(registry: Registry, name: str) -> Any:
    try:
        return registry.get(name)
    except RaypflError:  # of an installed package that cannot be imported
        return None


def _parameters(kind: Any) -> set[str]:
    try:
        return {*inspect.signature(kind).parameters} - _NO_OPTIONS
    except (TypeError, ValueError):
        return set()
