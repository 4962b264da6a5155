"""The clients' network, from the settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from raypfl.common import rng
from raypfl.common.errors import ConfigError, RaypflError
from raypfl.common.user_code import where_defined, with_location
from raypfl.engine.building.devices import algorithms_of_cpus, same_bits_on_gpus
from raypfl.federation.method import Method
from raypfl.models import MODELS, FlatModel, lora
from raypfl.models.networks import facts_for
from raypfl.models.weights import Pretrained

if TYPE_CHECKING:
    from raypfl.experiment import Experiment


def build_model(
    experiment: Experiment,
    input_shape: tuple[int, ...],
    outputs: int,
    num_tokens: int | None,
    device: torch.device,
    part: Callable[[Any], nn.Module] | None = None,
) -> FlatModel:
    """Build the clients' network for samples of this shape, as a function of a flat vector.

    Parameters
    ----------
    outputs : size of the output layer, which the objective decides.
    num_tokens : number of different words in the samples, if they are texts.
    part : returns the part of the network that is built; None: all of it.
    """
    if device.type == "cuda":
        same_bits_on_gpus(tf32=experiment.training.precision == "tf32")
    elif not experiment.ray.on_gpu and not experiment.ray.gpus_for_server:
        algorithms_of_cpus()

    settings = experiment.model
    entry = MODELS.get(settings.name)
    options = {**facts_for(settings.name, entry, input_shape, outputs, num_tokens), **settings.options}
    factory: Callable[[], nn.Module] = partial(_build, settings.name, entry, options)
    if part is not None:
        factory = partial(_part, factory, part)
    trained = settings.trained
    if settings.lora:
        factory = partial(lora.with_lora, factory, settings.lora)
        if trained is None and settings.frozen is None:
            trained = lora.TRAINED
    if settings.weights is not None:
        factory = Pretrained(factory, settings.name, settings.weights)
    factory = partial(_adapt_to_method, experiment.method, factory)

    dtype = torch.float64 if experiment.training.precision == "fp64" else torch.float32
    seed = rng.key(experiment.seed, "network") % 2**31
    return FlatModel(factory, seed, dtype, device, frozen=settings.frozen, trained=trained)


def _build(name: str, entry: Callable[..., nn.Module], options: Mapping[str, Any]) -> nn.Module:
    if isinstance(entry, nn.Module):
        raise ConfigError(f"model is {name!r}, which is a network; name its class, or a function that makes one.")

    try:
        network = entry(**options)
    except RaypflError:
        raise
    # A class of the user's own may raise anything.
    except Exception as error:
        arguments = ", ".join(f"{key}={value!r}" for key, value in options.items())
        takes_no_shape = isinstance(error, TypeError) and str(error).endswith(("'input_shape'", "'num_classes'"))
        remedy = " Every network gets both: def __init__(self, input_shape, num_classes)." if takes_no_shape else ""
        raise ConfigError(
            f"model is {name!r}, which cannot be built with {arguments}: {type(error).__name__}: "
            f"{with_location(error)}{remedy}"
        ) from error
    return _require_module(network, f"model is {name!r}, which")


def _part(factory: Callable[[], nn.Module], part: Callable[[Any], nn.Module]) -> nn.Module:
    return part(factory())


def _adapt_to_method(method: Method, factory: Callable[[], nn.Module]) -> nn.Module:
    return _require_module(method.network(factory()), where_defined(method.network))


def _require_module(network: Any, returned_by: str) -> nn.Module:
    """Return the network if it is one, else raise a ConfigError that says who returned it."""
    if not isinstance(network, nn.Module):
        raise ConfigError(f"{returned_by} returns a {type(network).__name__}; it must return a torch.nn.Module.")
    return network
