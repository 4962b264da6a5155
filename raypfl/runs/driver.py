"""Start, resume and check a run."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from raypfl.common.counting import series
from raypfl.common.errors import CheckpointError, ConfigError, Diverged, RaypflError, Refused, Unwritable
from raypfl.common.files import write
from raypfl.common.stopping import StopRequest
from raypfl.common.user_code import explain_user_errors
from raypfl.common.user_modules import edited_files
from raypfl.data.client_names import ClientNames
from raypfl.engine import history
from raypfl.engine.backends.cluster import connected
from raypfl.engine.backends.session import exclusive_ray, ray_lock, spare_server
from raypfl.engine.dispatcher import EventDispatcher
from raypfl.engine.events import Event, Listener, Progress, RunFinished, RunStarted, Warned
from raypfl.engine.job import Job
from raypfl.experiment import Experiment
from raypfl.experiment.identity import code_digests
from raypfl.runs import preparing
from raypfl.runs.folders import new_folder
from raypfl.runs.inline import run_inline
from raypfl.runs.on_ray import run_on_ray
from raypfl.runs.records import (
    DESCRIPTION,
    METADATA,
    discard_unstarted,
    ended_at_once,
    reopen,
    rounds_saved,
    write_client_names,
    write_description,
    write_tables,
)
from raypfl.runs.result import RunResult
from raypfl.runs.resuming import is_complete_as, notice_of_edited_code, refuse_other_checkpoints, resumed
from raypfl.runs.together import Place
from raypfl.storage.lease import hold_lease, refuse_unless_held

STOPPING = "Stopping: the finished rounds are being saved. Press Ctrl-C again to stop without saving them."


def run(
    experiment: Experiment,
    *,
    listeners: Sequence[Listener] = (),
    run_dir: str | Path | None = None,
    lockstep: bool = False,
    place: Place | None = None,
) -> RunResult:
    """Run an experiment without showing anything; otherwise like :func:`raypfl.run`.

    Parameters
    ----------
    lockstep : whether the server waits after a checkpoint until all listeners have returned.
    place : the run's place among runs that advance together in this process; None: it is on its own.
    """
    if not isinstance(experiment, Experiment):
        raise ConfigError(
            f"raypfl.run takes an Experiment, not {experiment!r}; make one with raypfl.Experiment.from_yaml(...) from "
            "YAML, or with raypfl.Experiment(rounds=10, ...)."
        )

    folder = (new_folder(experiment) if run_dir is None else Path(run_dir)).resolve()
    if (folder / DESCRIPTION).exists() or (folder / "checkpoints").exists():
        raise ConfigError(
            f"{folder} already has a run: continue it with `raypfl resume {folder}`, or name another folder."
        )

    write_description(folder, experiment)
    try:
        return _run_in_folder(experiment, folder, listeners, lockstep, place)
    except Refused:
        discard_unstarted(folder)
        raise


def resume(
    run_dir: str | Path,
    *,
    listeners: Sequence[Listener] = (),
    overrides: Sequence[str] = (),
    lockstep: bool = False,
    place: Place | None = None,
) -> RunResult:
    """Continue a run without showing anything; otherwise like :func:`raypfl.resume`.

    `lockstep` and `place` are as in :func:`run`.
    """
    folder = Path(run_dir).resolve()
    experiment = resumed(folder, overrides)
    if is_complete_as(folder, experiment):
        # Nothing is left to do, so the records stay as they are.
        _warn_of_edited_code(folder, experiment, EventDispatcher(listeners))
        return RunResult.load(folder)
    return _run_in_folder(experiment, folder, listeners, lockstep, place)


def check(experiments: Sequence[Experiment], *, listeners: Sequence[Listener] = ()) -> None:
    """Check all runs of a comparison before the first one starts; see :func:`raypfl.runs.preparing.check`."""
    with explain_user_errors():
        preparing.check(experiments, EventDispatcher(listeners))


@contextlib.contextmanager
def session(experiment: Experiment, *, listeners: Sequence[Listener] = ()) -> Iterator[None]:
    """While active, runs on Ray share a connection, a local cluster and actors; for inline runs it does nothing."""
    if experiment.engine.backend == "inline":
        yield
        return

    with connected(experiment.ray, EventDispatcher(listeners)) as ray:
        spare_server.shared = True
        try:
            yield
        finally:
            with ray_lock:
                spare_server.shared = False
                spare_server.release(ray)


def _run_in_folder(
    experiment: Experiment, folder: Path, listeners: Sequence[Listener], lockstep: bool, place: Place | None
) -> RunResult:
    """Begin or continue the run whose description is in a folder; the other parameters are as in :func:`run`."""
    # Runs that advance together share a process, whatever the backend is.
    is_inline = experiment.engine.backend == "inline" or place is not None
    emit = EventDispatcher([partial(_write_start, folder), *listeners])
    stop = StopRequest() if place is None else place.stop

    with contextlib.ExitStack() as stack:
        stack.enter_context(explain_user_errors())
        _check_edited_files(experiment, is_inline, emit)
        if not is_inline:
            stack.enter_context(exclusive_ray())
        stack.enter_context(stop.acknowledged(lambda: emit(Progress(STOPPING))))
        stack.enter_context(stop.listening())

        with stop.interruptible():
            refuse_other_checkpoints(folder, experiment)
            if preparing.needs_ray(experiment):
                # Otherwise a local cluster would start for the preparation, and another one for the run.
                stack.enter_context(connected(experiment.ray, emit))
            job, prepared = preparing.prepare(experiment, folder, emit, lockstep)
            stack.enter_context(hold_lease(job.checkpoints, job.attempt, lambda text: emit(Progress(text))))
            if rounds_saved(folder, experiment):
                _warn_of_edited_code(folder, experiment, emit)
            elif history.read(folder) and not ended_at_once(folder):
                emit(Warned(_begins_again(folder, job.checkpoints)))

        # Of runs that advance together, one may have been asked to stop while it was prepared.
        if stop.received:
            raise KeyboardInterrupt
        run_job = partial(run_inline, place=place) if is_inline else run_on_ray
        with run_job(job, prepared, emit, stop) as finished:
            # Within the context, since leaving it stops Ray, which takes seconds.
            _write_end(job, finished, prepared.data.client_names)
    return RunResult.load(folder)


def _warn_of_edited_code(folder: Path, experiment: Experiment, emit: Listener) -> None:
    notice = notice_of_edited_code(folder, experiment)
    if notice:
        emit(Warned(notice))


def _check_edited_files(experiment: Experiment, is_inline: bool, emit: Listener) -> None:
    """Warn of the user's files that were edited after their import; refuse them where Ray's processes import them anew.

    Such a run would mix the code of two versions, and its records would have the hash of one.
    """
    files = edited_files(code_digests(experiment.to_dict()))
    if not files:
        return
    edited = f"{series(file.name for file in files)}: edited since this Python process imported it"
    remedy = "restart Python (in a notebook, its kernel)"
    if not is_inline:
        raise ConfigError(
            f"{edited}. The run would mix the code before the edit, which this process has, with the code after it, "
            f"which Ray's processes import; {remedy}."
        )
    emit(Warned(f"{edited}, so this run uses the code from before the edit. For the code as it is now, {remedy}."))


def _begins_again(folder: Path, checkpoints: str) -> str:
    """Return the warning of a run that lost its checkpoints, or was killed before the first of them."""
    return (
        f"The run in {folder} was started before, but has no checkpoint in {checkpoints}: it begins again with "
        "round 1. If its folder was renamed, or its checkpoints are elsewhere, stop it and copy them there."
    )


def _write_start(folder: Path, event: Event) -> None:
    # Only once the run has begun: a resume whose changes are refused must leave the folder unchanged.
    if isinstance(event, RunStarted):
        reopen(folder)
        history.add(folder, event.first_round, event.experiment, metadata=event.metadata)
        write_description(folder, event.experiment)
        write(folder / METADATA, json.dumps(event.metadata, indent=1))


def _write_end(job: Job, finished: RunFinished, client_names: ClientNames | None) -> None:
    """Write the end of a run into its folder, and raise its error if it has one."""
    problems = [finished.error] if finished.error else []
    error_class = Diverged if finished.status == "diverged" else RaypflError
    try:
        refuse_unless_held(job.checkpoints, job.attempt)
        if client_names is not None:
            write_client_names(Path(job.run_dir), client_names)
        write_tables(Path(job.run_dir), finished)
    except Unwritable as problem:
        problems.append(f"{problem} `raypfl resume {job.run_dir}` then continues from the newest checkpoint.")
        error_class = Unwritable
    except CheckpointError as problem:
        problems.append(str(problem))

    if problems:
        raise error_class("\n".join(dict.fromkeys(problems)))
