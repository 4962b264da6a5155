"""What a run needs before it starts: its data, a network that fits them, and all that the settings leave open."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from raypfl.common.threads import threads
from raypfl.devices.settings import DeviceSettings
from raypfl.engine import history
from raypfl.engine.backends.actors.actor_pools import reserved
from raypfl.engine.backends.cluster import connected, refuse_too_many_actors
from raypfl.engine.backends.session import spare_server
from raypfl.engine.building.devices import device_for, refuse_missing_gpu
from raypfl.engine.building.rounds import schedule_for
from raypfl.engine.building.turns import digest_of_files
from raypfl.engine.events import Listener, Progress, Warned
from raypfl.engine.job import Job
from raypfl.engine.prepared import Prepared, threads_of_server
from raypfl.evaluation import refuse_untestable
from raypfl.evaluation.masking import refuse_unmaskable
from raypfl.experiment import Experiment
from raypfl.experiment.identity import code_digests
from raypfl.federation.settings import EngineSettings
from raypfl.models.weights import RANDOM, digest, origin
from raypfl.runs.checks.compression import refuse_idle_compression
from raypfl.runs.checks.exchanged import refuse_exchanged
from raypfl.runs.checks.gpu import gpu_errors_explained
from raypfl.runs.checks.hooks import refuse_mistaken_hooks
from raypfl.runs.checks.network import (
    outputs_of_batch,
    refuse_channels_last,
    refuse_frozen_output_layer,
    refuse_lone_samples,
    refuse_misfit,
    refuse_missing_adapters,
    refuse_mixed_samples,
    refuse_outputs,
    warn_of_probabilities,
)
from raypfl.runs.checks.privacy import refuse_unprotected
from raypfl.runs.checks.rehearsal import refuse_failing_evaluation
from raypfl.runs.checks.robustness import refuse_unfit_attack, refuse_unfit_rule
from raypfl.runs.checks.settings import (
    refuse_another_objective,
    refuse_another_optimizer,
    refuse_large_cohort,
    refuse_missing_pools,
    refuse_missing_validation,
    refuse_missing_weights,
    refuse_other_tokens,
    refuse_to_augment,
    refuse_untested_clients,
    warn_of_test_data,
)
from raypfl.runs.choices.autotune import Candidate, choose
from raypfl.runs.choices.gpu_task import run_on_gpu
from raypfl.runs.choices.pretraining import needs_gpu_of_cluster, with_pretrained
from raypfl.runs.choices.together import trains_together
from raypfl.runs.choices.turn import turn_of
from raypfl.runs.records import recorded_reason


@gpu_errors_explained()
def prepare(experiment: Experiment, folder: Path, emit: Listener, lockstep: bool) -> tuple[Job, Prepared]:
    """Make a run ready to start: load its data, check that all fits together, and choose what its settings leave open.

    The job records these choices, so that a resume makes the same ones.

    Parameters
    ----------
    folder : the run's folder.
    lockstep : whether the server waits after a checkpoint until all listeners have returned.

    Raises
    ------
    ConfigError : if settings, data, network and method do not fit together.
    """
    _refuse_without_data(experiment)
    emit(Progress("preparing data"))
    data = experiment.load_data()

    # Build the network exactly as the server and the actors do, with as many threads.
    with threads(threads_of_server(experiment)):
        prepared = Prepared(experiment, data, device_of_checks(experiment))
        refuse_unfit(prepared)
        pretrained = with_pretrained(prepared, emit)
        if pretrained is not prepared:
            prepared = pretrained
            refuse_unfit(prepared)
        _warn_of_random_weights(prepared, emit)
        _warn_of_unused_groups(prepared.experiment, emit)

        prepared = prepared.with_settings(prepared.experiment.replace(objective=prepared.objective))
        turns = None
        if experiment.devices != DeviceSettings():
            emit(Progress("rehearsing a round"))
            turns = prepared.turns(turn_of(prepared))
            # Refuses a buffer that would never be full.
            schedule_for(prepared.experiment, turns, prepared.task.trained)
        prepared, why = _with_executor(prepared, folder, emit)
        together = trains_together(prepared)

    job = Job(
        name=folder.name,
        run_dir=str(folder),
        experiment=prepared.experiment,
        why=why,
        fingerprint=data.fingerprint,
        weights=digest(prepared.experiment.model.weights),
        attempt=uuid.uuid4().hex,
        lockstep=lockstep,
        turns=turns,
        device_files=digest_of_files(prepared.experiment.devices),
        together=together,
        parent=history.parent_of(folder),
        code=code_digests(prepared.experiment.to_dict()),
    )
    return job, prepared


@gpu_errors_explained()
def check(experiments: Sequence[Experiment], emit: Listener) -> None:
    """Check all runs of a comparison, with their data and networks, before the first one starts.

    Parameters
    ----------
    experiments : the experiments, which differ only in methods and seeds, so only those of the first seed are checked.

    Raises
    ------
    ConfigError : for the first experiment that :func:`prepare` would refuse.
    """
    first = experiments[0]
    for experiment in experiments:
        _refuse_without_data(experiment)
    emit(Progress("preparing data"))
    data = first.load_data()
    for experiment in experiments:
        if experiment.seed == first.seed:
            refuse_unfit(Prepared(experiment, data, device_of_checks(experiment)))


def device_of_checks(experiment: Experiment) -> torch.device:
    """Return the device on which a run is checked in this process, before it starts.

    The driver of a run on Ray stays on the CPU: Ray has reserved no GPU for it, and each process that opens one keeps
    part of its memory.
    """
    if experiment.engine.backend != "inline":
        return torch.device("cpu")
    return device_for(experiment.ray.on_gpu)


def needs_ray(experiment: Experiment) -> bool:
    """Return whether :func:`prepare` computes on a GPU of the cluster, before a run on Ray starts."""
    return _is_timed_on_cluster(experiment) or needs_gpu_of_cluster(experiment)


def _is_timed_on_cluster(experiment: Experiment) -> bool:
    on_cluster = experiment.engine.backend != "inline" and experiment.ray.on_gpu
    return on_cluster and experiment.engine.executor == "fastest"


def _refuse_without_data(experiment: Experiment) -> None:
    """Raise a ConfigError for what can be told before the data are prepared, which may take minutes."""
    refuse_missing_gpu(experiment)
    if experiment.engine.backend == "ray":
        refuse_too_many_actors(experiment.ray)
    refuse_mistaken_hooks(experiment.method)
    refuse_missing_weights(experiment.model)
    refuse_another_optimizer(experiment)


def refuse_unfit(prepared: Prepared) -> None:
    """Raise a ConfigError unless settings, data, network and method fit together."""
    experiment = prepared.experiment
    refuse_untestable(experiment.evaluation.protocols, prepared.data, prepared.objective)
    refuse_untested_clients(experiment)
    refuse_unmaskable(experiment.evaluation.masks, prepared.objective)
    refuse_another_objective(prepared)
    refuse_to_augment(prepared)
    refuse_other_tokens(prepared)
    refuse_large_cohort(prepared)
    refuse_missing_pools(prepared)
    refuse_missing_validation(prepared)

    # The checks above need no network; those below do.
    refuse_exchanged(prepared)
    for number, homogeneous in enumerate(prepared.by_architecture()):
        refuse_misfit(homogeneous)
        refuse_missing_adapters(homogeneous)
        refuse_frozen_output_layer(homogeneous)
        experiment.method.check(homogeneous.model)
        refuse_mixed_samples(homogeneous)
        refuse_lone_samples(homogeneous, number)
    warn_of_test_data(experiment.method)
    outputs = outputs_of_batch(prepared, channels_last=False, train=False)
    refuse_outputs(prepared, outputs)
    warn_of_probabilities(prepared, outputs)
    refuse_failing_evaluation(prepared)
    refuse_unfit_attack(prepared)
    refuse_unfit_rule(prepared)
    refuse_unprotected(prepared)
    refuse_idle_compression(prepared)
    if experiment.training.channels_last and experiment.engine.executor != "vectorised":
        refuse_channels_last(prepared)


def _with_executor(prepared: Prepared, folder: Path, emit: Listener) -> tuple[Prepared, str]:
    """Choose executor and layout if the settings leave them open; return the reason as well."""
    experiment = prepared.experiment
    executor = experiment.engine.executor
    layout = experiment.training.channels_last
    is_open = executor in ("auto", "fastest") or (executor == "sequential" and layout is None)
    if not is_open:
        return prepared, recorded_reason(folder, experiment)

    emit(Progress("choosing an executor"))
    if _is_timed_on_cluster(experiment):
        candidate, why = _timed_on_gpu(prepared, emit)
    else:
        with threads(experiment.engine.threads):
            candidate, why = choose(prepared)
    engine = replace(experiment.engine, executor=candidate.executor)
    if candidate.executor == "sequential":
        # Without effect there, so that it has to have its default.
        engine = replace(engine, cuda_graphs=EngineSettings.cuda_graphs)
    changes = {
        "engine": engine,
        "training": replace(experiment.training, channels_last=candidate.channels_last),
    }
    # model_copy does not validate, which would take a tenth of a small run's time: both choices are valid.
    return prepared.with_settings(experiment.model_copy(update=changes)), why


def _timed_on_gpu(prepared: Prepared, emit: Listener) -> tuple[Candidate, str]:
    """Choose by timing on a GPU such as the client actors will have."""
    settings = prepared.experiment.ray
    pool = next(pool for pool in settings.actor_pools if pool.gpus_per_actor != 0)
    if pool.gpus_per_actor == "auto":
        pool = replace(pool, gpus_per_actor=1.0)
    with connected(settings, emit) as ray:
        spare_server.release(ray)
        return run_on_gpu(ray, reserved(pool), choose, prepared)


def _warn_of_random_weights(prepared: Prepared, emit: Listener) -> None:
    """Warn if settings freeze parameters that were never trained; a network that freezes its own does so by design."""
    settings = prepared.experiment.model
    if not settings.frozen and not settings.trained:
        return

    model = prepared.model
    total = sum(parameter.numel() for parameter in model.module.parameters())
    if model.num_parameters < total and origin(model.module) == RANDOM:
        emit(
            Warned(
                f"{total - model.num_parameters:,} of the network's {total:,} parameters are frozen at random values. "
                "Start from trained ones: model.weights, or model.pretrain."
            )
        )


def _warn_of_unused_groups(experiment: Experiment, emit: Listener) -> None:
    """Warn if a column is named for clients, but the partition deals its samples out in another way."""
    column = experiment.data.options.get("group")
    if column and not experiment.partition.by_group:
        emit(
            Warned(
                f"The clients are not the groups of data.group={column}; set partition=by_column to have one for each."
            )
        )
