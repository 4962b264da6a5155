"""Suggestions for an unknown key: where the setting really is, or what it is called here."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

from raypfl.common.errors import RaypflError, listed
from raypfl.common.registry import Registry
from raypfl.experiment.sections import COMPONENTS, SECTIONS

_NAMES_ELSEWHERE = {
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
"""Name of a setting in other libraries -> its name here."""

_NO_OPTIONS = {"config", "input_shape", "member", "name", "num_classes", "num_tokens", "options"}
_MOST_NAMES = 5
"""Largest number of components that a suggestion names."""


def suggestion(key: str, section: str = "") -> str:
    """Return ``"did you mean 'training.lr'?"`` for a key that a section lacks; an empty text if nothing has it.

    Settings come first, then other components of the section (``"mlp has it."``), then components of other sections.
    """
    settings = list(dict.fromkeys(_settings(key)))
    if settings:
        return _did_you_mean(settings)

    components = components_with(section, key)
    if components:
        verb = "has" if len(components) == 1 else "have"
        return f"{listed(components, _MOST_NAMES)} {verb} it."

    in_other_sections = [".".join((*path, key)) for path in COMPONENTS if components_with(".".join(path), key)]
    return _did_you_mean(in_other_sections) if in_other_sections else ""


def nearest(key: str, fields: Iterable[str]) -> str:
    """Return ``"did you mean 'method.lam'?"`` for a key that is nearly a field of an experiment or a section's option.

    An empty text: none is near.
    """
    options: set[str] = set()
    for settings_class in SECTIONS.values():
        options |= _parameters(settings_class)
    for registry, _ in COMPONENTS.values():
        for _, parameters in _parameters_by_name(registry):
            options |= parameters

    matches = difflib.get_close_matches(key, [*fields, *sorted(options.difference(fields))], n=1, cutoff=0.8)
    if not matches:
        return ""
    return _did_you_mean(matches) if matches[0] in fields else suggestion(matches[0])


def _did_you_mean(keys: Sequence[str]) -> str:
    return f"did you mean {' or '.join(map(repr, keys))}?"


def _settings(key: str) -> Iterator[str]:
    if key in _NAMES_ELSEWHERE:
        yield _NAMES_ELSEWHERE[key]
    for section, settings_class in SECTIONS.items():
        if key in _parameters(settings_class):
            yield f"{section}.{key}"


@lru_cache
def components_with(section: str, *options: str) -> tuple[str, ...]:
    """Return the names of a section's registered components that have these options."""
    path = tuple(section.split("."))
    if path not in COMPONENTS:
        return ()
    registry, _ = COMPONENTS[path]
    return tuple(name for name, parameters in _parameters_by_name(registry) if set(options) <= parameters)


def _parameters_by_name(registry: Registry) -> Iterator[tuple[str, set[str]]]:
    """Yield each registered component that is no family, such as ``timm:NAME``, and its parameters."""
    for name in registry:
        if ":" not in name:
            yield name, _parameters(_loaded(registry, name))


def _loaded(registry: Registry, name: str) -> Any:
    try:
        return registry.get(name)
    except RaypflError:
        # An installed package registers it, but cannot be imported.
        return None


def _parameters(component: Any) -> set[str]:
    try:
        return {*inspect.signature(component).parameters} - _NO_OPTIONS
    except (TypeError, ValueError):
        return set()
