"""Checks of method, objective, data and evaluation settings that need no network."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np

from raypfl.common.counting import counted
from raypfl.common.errors import ConfigError, did_you_mean
from raypfl.data.datasets.hub_tokens import tokenizer_of
from raypfl.data.datasets.readers.tabular.text_table import TextTable
from raypfl.data.datasets.words import PADDING
from raypfl.engine.prepared import Prepared
from raypfl.experiment import Experiment
from raypfl.experiment.settings import ModelSettings
from raypfl.learning.objectives import KINDS, OBJECTIVES
from raypfl.learning.optimizers import OPTIMIZERS, SGD
from raypfl.learning.sample_pools import checked_pool
from raypfl.methods import METHODS, Method
from raypfl.models.published.transformers import FAMILY
from raypfl.models.weights import is_file


def refuse_missing_weights(model: ModelSettings) -> None:
    """Raise a ConfigError if the file of initial weights does not exist, before data are prepared for minutes."""
    if model.weights and is_file(model.weights) and not Path(model.weights).is_file():
        raise ConfigError(f"model.weights is {model.weights!r}, but there is no such file.")


def refuse_another_objective(prepared: Prepared) -> None:
    """Raise a ConfigError unless data, objective, method and metrics fit together."""
    data = prepared.data
    method = prepared.experiment.method
    objective = prepared.objective
    name = OBJECTIVES.name_of(type(objective))

    if objective.targets not in ("", data.kind):
        raise ConfigError(
            f"objective is {name!r}, which is for {KINDS[objective.targets]}, but the targets of {data.name!r} are "
            f"{KINDS[data.kind]}."
        )

    for extra in prepared.experiment.extra_metrics:
        if extra.targets not in ("", data.kind):
            raise ConfigError(
                f"evaluation.metrics has {extra.name!r}, which is for {KINDS[extra.targets]}, but the targets of "
                f"{data.name!r} are {KINDS[data.kind]}. Leave it out."
            )

    if not isinstance(objective, method.objectives):
        learnable = " or ".join(repr(OBJECTIVES.name_of(objective_class)) for objective_class in method.objectives)
        raise ConfigError(
            f"method is {METHODS.name_of(type(method))!r}, which learns the objective {learnable}, but that of "
            f"{data.name!r} is {name!r}; choose another method."
        )

    metric = prepared.experiment.evaluation.metric
    if metric is not None and metric not in prepared.measures.aggregates:
        raise ConfigError(
            f"evaluation.metric is {metric!r}, which the objective {name!r} does not have; "
            f"{did_you_mean(metric, prepared.measures.aggregates)}"
        )


def refuse_to_augment(prepared: Prepared) -> None:
    """Raise a ConfigError if samples that are no images are to be augmented."""
    shape = prepared.data.input_shape
    are_images = len(shape) == 3 and min(shape[1:]) > 1
    if prepared.experiment.data.augmentation and not are_images:
        raise ConfigError(
            f"data.augmentation is for images, but the samples of {prepared.data.name!r} are "
            f"{'x'.join(map(str, shape))}; leave it out."
        )


def refuse_other_tokens(prepared: Prepared) -> None:
    """Raise a ConfigError if the data's tokens have other meanings to the network."""
    name = prepared.experiment.model.name
    reader = prepared.experiment.data.reader
    if not isinstance(reader, TextTable):
        return
    if not name.startswith(FAMILY):
        padding = tokenizer_of(reader.tokens).pad_token_id if reader.tokens.startswith(FAMILY) else PADDING
        if padding != PADDING:
            raise ConfigError(
                f"model is {name!r}, for which token {PADDING} is padding, but that of {reader.tokens} is {padding}. "
                "Choose other tokens, or this model."
            )
    elif reader.tokens != name:
        raise ConfigError(f"model is {name!r}, but data.tokens is {reader.tokens!r}; set data.tokens={name}.")


def refuse_large_cohort(prepared: Prepared) -> None:
    """Raise a ConfigError if a cohort is larger than the number of clients that are trained."""
    size = prepared.experiment.cohort.size
    if size and size > prepared.num_trained:
        unseen = prepared.data.num_clients - prepared.num_trained
        trained = f"{prepared.num_trained} clients that are trained ({unseen} are unseen)"
        raise ConfigError(
            f"cohort.size is {size}, but {prepared.experiment.data.name} has "
            f"{trained if unseen else f'{prepared.num_trained} clients'}; draw at most that many."
        )


def refuse_missing_pools(prepared: Prepared) -> None:
    """Raise a ConfigError if network, method or an analysis needs a pool that the data lack."""
    experiment = prepared.experiment
    names = [*experiment.model.needed_pools(), *experiment.method.needed_pools()]
    for analysis in experiment.analyses:
        names += analysis.needed_pools()
    for name in names:
        checked_pool(name, prepared.data.pools)


def refuse_missing_validation(prepared: Prepared) -> None:
    """Raise a ConfigError if the method needs validation samples of each client that is trained, and one has none."""
    if not prepared.experiment.method.needs_validation:
        return

    sizes = prepared.data.sizes("val")
    lacking = np.setdiff1d(np.flatnonzero(sizes == 0), prepared.task.unseen)
    if len(lacking):
        raise ConfigError(
            f"method is {METHODS.name_of(type(prepared.experiment.method))!r}, which needs validation samples of each "
            f"client, but client {lacking[0]} has none (in all {counted(len(lacking), 'client')}). Set "
            "data.val_fraction, such as 0.2, or give clients more samples."
        )


def refuse_another_optimizer(experiment: Experiment) -> None:
    """Raise a ConfigError if the method needs local training by SGD, and the settings name another optimizer."""
    optimizer = experiment.training.local_optimizer
    if experiment.method.needs_sgd and type(optimizer) is not SGD:
        raise ConfigError(
            f"method is {METHODS.name_of(type(experiment.method))!r}, whose local steps are those of SGD, but "
            f"training.optimizer is {OPTIMIZERS.name_of(type(optimizer))!r}. Set training.optimizer=sgd."
        )


def refuse_untested_clients(experiment: Experiment) -> None:
    """Raise a ConfigError if the only protocol is ``unseen``, and the method has no model for it; else warn of that."""
    method = experiment.method
    protocols = experiment.evaluation.protocols
    hooks = ["unseen_model", "personalize"]
    if not experiment.model.is_heterogeneous:
        hooks.append("global_model")
    if "unseen" not in protocols or any(method.has(hook) for hook in hooks):
        return

    sentence = (
        f"evaluation.protocols has 'unseen', but {METHODS.name_of(type(method))!r} has no model for clients that are "
        "never trained: neither a global one nor a way to make one"
    )
    if set(protocols) == {"unseen"}:
        raise ConfigError(f"{sentence}. Nothing would be tested; add local, or choose another method.")
    warnings.warn(f"{sentence}. They are not tested.", stacklevel=2)


def warn_of_test_data(method: Method) -> None:
    """Warn if a method may train on test samples."""
    if method.test_data_in_training:
        warnings.warn(
            f"{type(method).__name__} declares test_data_in_training: its rounds may read the samples that it is then "
            "tested on, so test results do not show how well it does on new ones.",
            stacklevel=2,
        )
