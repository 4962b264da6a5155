"""Start, resume and check runs."""

from __future__ import annotations

import contextlib
import json
import uuid
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from raypfl.clients.worker import Worker
from raypfl.common.errors import (
    CheckpointError,
    ConfigError,
    RaypflError,
    Refused,
    Stopped,
    Unwritable,
    did_you_mean,
    known_pool,
)
from raypfl.common.files import write
from raypfl.common.stopping import StopRequest
from raypfl.common.threads import threads
from raypfl.common.user_code import framed
from raypfl.data import ClientData, load_federated
from raypfl.engine import history
from raypfl.engine.audience import Audience
from raypfl.engine.backends.actor_pools import reserved
from raypfl.engine.backends.cluster import client_actors, connected, for_server, has_died, node_for_server
from raypfl.engine.backends.inline import Inline
from raypfl.engine.backends.of_this_process import alone_on_ray, on_ray_now, spare
from raypfl.engine.backends.processes import keep_freed_memory
from raypfl.engine.events import Event, Listener, Progress, RunFinished, RunStarted, Warned
from raypfl.engine.server import Job, Server
from raypfl.engine.setup import (
    device_for,
    make_context,
    make_measures,
    make_model,
    make_task,
    num_groups,
    refuse_missing_gpu,
    threads_of_server,
)
from raypfl.evaluation import Measures, refuse_untestable
from raypfl.evaluation.masking import refuse_unmaskable
from raypfl.experiment import Experiment
from raypfl.learning.objectives import KINDS, OBJECTIVES
from raypfl.methods import METHODS, Method
from raypfl.models import FlatModel
from raypfl.models.weights import RANDOM, digest, origin
from raypfl.runs.autotune import choose, refuse_channels_last, refuse_lone_samples, refuse_misfit, refuse_outputs
from raypfl.runs.folders import new_folder
from raypfl.runs.gpu_share import with_numbers
from raypfl.runs.pretraining import with_pretrained
from raypfl.runs.protection import refuse_unprotected
from raypfl.runs.result import (
    METADATA,
    RECIPE,
    Result,
    description,
    forget_unbegun,
    is_finished,
    reason_before,
    reopen,
    write_description,
    write_tables,
)
from raypfl.runs.resuming import ends_later, resumed
from raypfl.storage.lease import held, refuse_unless_held

DRIVER_POLL = 0.2
PATIENCE = 5.0
"""Seconds to wait for a server's events before asking again."""
STOPPING = "Stopping: the rounds that are done are being saved. Ctrl-C again stops without that."
JUDGED = ("global_model", "personal_model", "unseen_model")


def run(
    experiment: Experiment,
    *,
    listeners: Sequence[Listener] = (),
    run_dir: str | Path | None = None,
    lockstep: bool = False,
) -> Result:
    """Run an experiment and show nothing; the rest is as in :func:`raypfl.run`.

    `lockstep` : after a checkpoint, the server waits until all listeners have returned.
    """
    if not isinstance(experiment, Experiment):
        raise ConfigError(
            f"raypfl.run takes an Experiment, not {experiment!r}; make one with raypfl.Experiment.from_yaml(...) from "
            "YAML, or with raypfl.Experiment(rounds=10, ...)."
        )
    folder = (new_folder(experiment) if run_dir is None else Path(run_dir)).resolve()
    if (folder / RECIPE).exists() or (folder / "checkpoints").exists():
        raise ConfigError(
            f"{folder} already has a run: continue it with `raypfl resume {folder}`, or name another folder."
        )
    write_description(folder, experiment)
    try:
        return _run(experiment, folder, listeners, lockstep)
    except Refused:
        forget_unbegun(folder)
        raise


def resume(
    run_dir: str | Path,
    *,
    listeners: Sequence[Listener] = (),
    overrides: Sequence[str] = (),
    lockstep: bool = False,
) -> Result:
    """Continue a run and show nothing; the rest is as in :func:`raypfl.resume`, and `lockstep` as in `run`."""
    folder = Path(run_dir).resolve()
    begun, experiment = description(folder), resumed(folder, overrides)
    if is_finished(folder) and not ends_later(experiment, begun):
        return Result.load(folder)  # nothing is left to do, so its records stay as they are
    return _run(experiment, folder, listeners, lockstep)


def check(experiments: Sequence[Experiment], *, listeners: Sequence[Listener] = ()) -> None:
    """Check all runs of a comparison, with their data and networks, before the first one starts.

    Parameters
    ----------
    experiments : they differ only in methods and seeds, so the data of one seed is checked for all.

    Raises
    ------
    ConfigError : for the first experiment that :func:`run` would refuse.
    """
    first = experiments[0]
    refuse_missing_gpu(first)
    Audience(listeners)(Progress("preparing data"))
    with framed():
        data = load_federated(first.data, first.partition, seed=first.seed)
        for experiment in experiments:
            if experiment.seed == first.seed:
                _fitting_model(experiment, data)


@contextlib.contextmanager
def session(experiment: Experiment, *, listeners: Sequence[Listener] = ()) -> Iterator[None]:
    """A context in which runs on Ray share one connection, one local cluster, and actors; inline runs need none."""
    if experiment.engine.backend == "inline":
        yield
        return
    with connected(experiment.ray, Audience(listeners)) as ray:
        spare.shared = True
        try:
            yield
        finally:
            with on_ray_now:
                spare.shared = False
                spare.release(ray)


def _fitting_model(experiment: Experiment, data: ClientData) -> FlatModel:
    """The clients' network; raises a ConfigError unless settings, data, network and method fit together."""
    measures = make_measures(experiment, data)
    refuse_untestable(experiment.evaluation.protocols, data, measures.objective)
    refuse_unmaskable(experiment.evaluation.masks, measures.objective)
    _refuse_incomplete(experiment.method)
    _refuse_another_objective(experiment, data, measures)
    _refuse_to_augment(experiment, data)
    if experiment.cohort.size and experiment.cohort.size > data.num_clients:
        raise ConfigError(
            f"cohort.size is {experiment.cohort.size}, but {experiment.data.name} has {data.num_clients} clients; draw "
            "at most that many."
        )
    analysed = [name for one in experiment.analyses for name in one.needed_pools()]
    for name in (*experiment.model.needed_pools(), *experiment.method.needed_pools(), *analysed):
        known_pool(name, data.pools)
    model = make_model(experiment, data, device_for(experiment.ray.on_gpu))
    refuse_misfit(experiment, model, data)
    experiment.method.check(model)
    refuse_lone_samples(experiment, model, data)
    _warn_of_test_data(experiment.method)
    refuse_outputs(experiment, model, data)
    refuse_unprotected(experiment, data, model)
    if experiment.training.channels_last and experiment.engine.executor != "vectorised":
        refuse_channels_last(model, experiment.training, data)
    return model


def _refuse_incomplete(method: Method) -> None:
    name = type(method).__name__
    if type(method).start is Method.start:
        raise ConfigError(f"{name} does not say how it starts: define start(self, task).")
    if type(method).round is Method.round:
        raise ConfigError(f"{name} does not say what a round is: define round(self, server, cohort).")
    if all(getattr(type(method), name) is getattr(Method, name) for name in JUDGED):
        raise ConfigError(
            f"{name} has no model to evaluate: define global_model(self, server), which returns a "
            "vector [P+B] such as server['theta'], or personal_model(self, clients, server), which returns [K, P+B], "
            "or both."
        )


def _warn_of_test_data(method: Method) -> None:
    if method.test_data_in_training:
        warnings.warn(
            f"{type(method).__name__} declares test_data_in_training: its rounds may read the samples that it is then "
            "tested on, so that test results do not show how well it does on new ones.",
            stacklevel=2,
        )


def _refuse_another_objective(experiment: Experiment, data: ClientData, measures: Measures) -> None:
    """Raise a ConfigError unless data, objective, method and the metric for the best round fit together."""
    objective, name = measures.objective, OBJECTIVES.name_of(type(measures.objective))
    if objective.targets not in ("", data.kind):
        raise ConfigError(
            f"objective is {name!r}, which is for {KINDS[objective.targets]}, but the targets of {data.name!r} are "
            f"{KINDS[data.kind]}."
        )
    if not isinstance(objective, experiment.method.objectives):
        able = " or ".join(repr(OBJECTIVES.name_of(one)) for one in experiment.method.objectives)
        raise ConfigError(
            f"method is {METHODS.name_of(type(experiment.method))!r}, which learns the objective {able}, but that of "
            f"{data.name!r} is {name!r}; choose another method."
        )
    metric = experiment.evaluation.metric
    if metric is not None and metric not in measures.aggregates:
        raise ConfigError(
            f"evaluation.metric is {metric!r}, which the objective {name!r} does not have; "
            f"{did_you_mean(metric, measures.aggregates)}"
        )


def _refuse_to_augment(experiment: Experiment, data: ClientData) -> None:
    shape = data.input_shape
    if experiment.data.augmentation and (len(shape) != 3 or min(shape[1:]) == 1):
        raise ConfigError(
            f"data.augmentation is for images, but the samples of {data.name!r} are {'x'.join(map(str, shape))}; leave "
            "it out."
        )


def _run(experiment: Experiment, folder: Path, listeners: Sequence[Listener], lockstep: bool) -> Result:
    telling = Audience([partial(_write_beginning, folder), *listeners])
    stop = StopRequest()
    with contextlib.ExitStack() as stack:
        stack.enter_context(framed())
        if experiment.engine.backend == "ray":
            stack.enter_context(alone_on_ray())
        stack.enter_context(stop.acknowledged(lambda: telling(Progress(STOPPING))))
        stack.enter_context(stop.listening())
        with stop.interruptible():
            refuse_missing_gpu(experiment)
            telling(Progress("preparing data"))
            data = load_federated(experiment.data, experiment.partition, seed=experiment.seed)
            job = _job(experiment, folder, data, lockstep, telling)
            stack.enter_context(held(job.checkpoints, job.attempt, lambda text: telling(Progress(text))))
        backend = _inline if experiment.engine.backend == "inline" else _on_ray
        with backend(job, data, telling, stop) as finished:
            _keep(job, finished)  # before Ray is stopped, which takes seconds
    return Result.load(folder)


def _keep(job: Job, finished: RunFinished) -> None:
    """Write the end of a run into its folder, and raise its error if it has one."""
    problems = [finished.error] if finished.error else []
    try:
        refuse_unless_held(job.checkpoints, job.attempt)
        write_tables(Path(job.run_dir), finished)
    except Unwritable as problem:
        problems.append(f"{problem} `raypfl resume {job.run_dir}` then continues from the newest checkpoint.")
    except CheckpointError as problem:
        problems.append(str(problem))
    if problems:
        raise RaypflError("\n".join(dict.fromkeys(problems)))


def _write_beginning(folder: Path, event: Event) -> None:
    # Not before the run has begun: a resume whose changes are refused must leave the folder unchanged.
    if isinstance(event, RunStarted):
        reopen(folder)
        history.add(folder, event.first_round, event.experiment, metadata=event.metadata)
        write_description(folder, event.experiment)
        write(folder / METADATA, json.dumps(event.metadata, indent=1))


def _job(experiment: Experiment, folder: Path, data: ClientData, lockstep: bool, emit: Listener) -> Job:
    """The server's job. It says what the settings left open, so that a resume does the same."""
    engine, training = experiment.engine, experiment.training
    model = _fitting_model(experiment, data)
    pretrained = with_pretrained(experiment, data, device_for(experiment.ray.gpus_for_server), emit)
    if pretrained is not experiment:
        experiment, model = pretrained, _fitting_model(pretrained, data)
    if experiment.model.frozen or experiment.model.trained:  # what a network freezes itself is its design
        _warn_of_random_weights(model, emit)
    experiment = experiment.replace(objective=make_measures(experiment, data).objective)
    why = reason_before(folder, experiment)
    if engine.executor in ("auto", "fastest") or (engine.executor == "sequential" and training.channels_last is None):
        emit(Progress("choosing an executor"))
        with threads(engine.threads):
            chosen, why = choose(experiment, data, device_for(experiment.ray.on_gpu))
        layout = str(chosen.channels_last).lower()
        experiment = experiment.override([f"engine.executor={chosen.executor}", f"training.channels_last={layout}"])
    return Job(
        name=folder.name,
        run_dir=str(folder),
        experiment=experiment,
        why=why,
        fingerprint=data.fingerprint,
        weights=digest(experiment.model.weights),
        attempt=uuid.uuid4().hex,
        lockstep=lockstep,
        parent=history.parent_of(folder),
    )


def _warn_of_random_weights(model: FlatModel, emit: Listener) -> None:
    total = sum(parameter.numel() for parameter in model.module.parameters())
    if model.num_parameters < total and origin(model.module) == RANDOM:
        emit(
            Warned(
                f"{total - model.num_parameters:,} of the network's {total:,} parameters are frozen at random values. "
                "Start from trained ones: model.weights, or model.pretrain."
            )
        )


@contextlib.contextmanager
def _inline(job: Job, data: ClientData, emit: Listener, stop: StopRequest) -> Iterator[RunFinished]:
    keep_freed_memory()
    experiment = job.experiment
    here, there = device_for(experiment.ray.gpus_for_server), device_for(experiment.ray.on_gpu)
    with threads(threads_of_server(experiment)):
        task = make_task(experiment, data, here)
        of_clients = task if here == there else make_task(experiment, data, there)
        context = make_context(experiment, data, of_clients, experiment.ray.gpus or 1.0)
        worker = Worker(context, experiment.method, experiment.analyses)
        metadata = {"backend": "inline", "actors": 1, "device": str(there)}
        yield Server(job, task, data, Inline(worker, stop, experiment.engine.threads), emit, metadata).run()


@contextlib.contextmanager
def _on_ray(job: Job, data: ClientData, emit: Audience, stop: StopRequest) -> Iterator[RunFinished]:
    torch.cuda.empty_cache()  # what the checks used is for the actors; does nothing where no GPU was used
    with contextlib.ExitStack() as stack:
        with stop.interruptible():
            ray = stack.enter_context(connected(job.experiment.ray, emit))
            if any(pool.gpus_per_actor == "auto" for pool in job.experiment.ray.actor_pools):
                spare.release(ray)
                job = replace(job, experiment=with_numbers(ray, job.experiment, data, emit))
            emit(Progress("starting actors"))
            settings = job.experiment.ray
            actors = client_actors(ray, settings, num_groups(job.experiment, data))
            node = node_for_server(ray, settings, job.checkpoints)
            kind = (actors, [reserved(pool) for pool in settings.actor_pools], for_server(settings), node)
            server = spare.take(ray, kind) or _server_actor(ray, *kind)
        finished = None
        try:
            while finished is None:
                reached = emit.round
                try:
                    finished = _follow(ray, server, (job, data), emit, stop)
                except _ServerDied:
                    if emit.round == reached:
                        raise
                    server = _server_actor(ray, *kind)  # Ray counts deaths, however much was done between them
            yield finished
        finally:
            if spare.shared and finished is not None:
                spare.kind, spare.server = kind, server
            elif not has_died(ray):
                ray.kill(server)


def _server_actor(
    ray: Any, actors: list[int], pools: list[dict[str, Any]], own: dict[str, float], node: str | None
) -> Any:
    """A server actor, in the current placement group if there is one.

    Parameters
    ----------
    actors : number of its client actors, by pool. pools, own : resources of each of them, and of the server itself.
    node : id of the node that it must be on; None: any.
    """
    from raypfl.engine.backends.server_actor import ServerActor

    options: dict[str, Any] = {**own, "max_restarts": 3, "max_task_retries": 3}
    if node is not None:  # not `soft`: Ray would put an actor that reserves nothing on any node
        strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        options["scheduling_strategy"] = strategy
    remote = ray.remote(concurrency_groups={"control": 1})(ServerActor)
    return remote.options(**options).remote(actors, pools)


def _follow(ray: Any, server: Any, job: tuple[Job, ClientData], emit: Listener, stop: StopRequest) -> RunFinished:
    """Let a server actor run a job, and pass on its events until it ends."""
    from raypfl.engine.backends.shipment import Shipment

    run = uuid.uuid4().hex
    experiment = job[0].experiment
    finished = server.run.remote(run, Shipment.of(*job), experiment.ray, num_groups(experiment, job[1]))
    stream, received = "", 0
    silent = ray.exceptions.RayActorError, ray.exceptions.ActorUnavailableError, ray.exceptions.GetTimeoutError
    done: list[Any] = []
    while not done:
        done, _ = ray.wait([finished], timeout=DRIVER_POLL)
        if has_died(ray):
            raise RaypflError(
                "Ray has died: its raylet or GCS process was killed or ran out of memory. "
                f"`raypfl resume {job[0].run_dir}` continues from the newest checkpoint."
            )
        if stop.made:  # repeatedly, since the server may not have begun, or may have been restarted
            server.stop.remote(run)
        with contextlib.suppress(*silent):
            now, events = ray.get(server.events.remote(run, stream, received), timeout=PATIENCE)
            if now != stream:
                stream, received = now, 0
            received += len(events)
            for event in events:
                try:
                    emit(event)
                except Stopped:
                    stop.made = True
    try:
        return ray.get(finished)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, RaypflError):
            raise error.cause from None
        raise
    except ray.exceptions.RayError as error:
        raise _ServerDied(
            f"The server's process died, and again after each restart: {str(error).splitlines()[0]} "
            f"`raypfl resume {job[0].run_dir}` continues from the newest checkpoint."
        ) from error


class _ServerDied(RaypflError):
    """The server's process died as often as Ray may start it."""
