"""Follow a job: its log as it is written, however often the stream breaks, and its exit code at the end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from raypfl.common.errors import RaypflError
from raypfl.integrations.jobs.cluster import Unreachable, explain_cluster_errors

if TYPE_CHECKING:
    from ray.job_submission import JobDetails, JobSubmissionClient

POLL = 1.0
"""Seconds between looks at a job whose log has ended."""

SILENCE = 60.0
"""Seconds of silence after which a log's stream is opened again, since a connection may be lost unnoticed."""

PATIENCE = 300.0
"""Most seconds to wait for a job server that does not answer."""

REFUSED = 15.0
"""Seconds to wait if the head's machine refuses connections, which means that the head's processes are gone."""

STOPPED = 130
"""The exit code of a job that was stopped: what a shell expects after Ctrl-C."""


def follow(client: JobSubmissionClient, job: str, show: Callable[[str], None]) -> JobDetails:
    """Show a job's log until the job has ended; return its details.

    Ray's stream of a log may end while the job runs, and begins from the start when it is opened again.

    Parameters
    ----------
    show : a function that is called with each new piece of the log.

    Raises
    ------
    RaypflError : if the job server does not answer for `PATIENCE` seconds.
    """
    log = _RepeatedLog(show)
    while True:
        _tail(client, job, log)
        details = _details(client, job)
        if details.status.is_terminal():
            # A broken stream may have missed the end of the log.
            with contextlib.suppress(RaypflError), explain_cluster_errors():
                log.restart()
                log.add(client.get_job_logs(job))
            return details
        time.sleep(POLL)


def wait(client: JobSubmissionClient, job: str) -> JobDetails:
    """Wait until a job has ended; return its details."""
    while True:
        details = _details(client, job)
        if details.status.is_terminal():
            return details
        time.sleep(POLL)


def exit_code(details: JobDetails) -> int:
    """Return the exit code of a job's command: 130 if it was stopped, and 128 + N if signal N killed it."""
    status = details.status.value
    if status == "STOPPED":
        return STOPPED
    code = details.driver_exit_code or int(status == "FAILED")
    return code if code >= 0 else 128 - code


class _RepeatedLog:
    """Shows a log once, although it is received from its start again and again."""

    def __init__(self, show: Callable[[str], None]):
        self._show = show
        self._length_shown = 0
        self._length_received = 0  # since the last start

    def restart(self) -> None:
        self._length_received = 0

    def add(self, text: str) -> None:
        new = text[max(0, self._length_shown - self._length_received) :]
        self._length_received += len(text)
        self._length_shown = max(self._length_shown, self._length_received)
        if new:
            self._show(new)


def _tail(client: JobSubmissionClient, job: str, log: _RepeatedLog) -> None:
    """Show the log until the stream ends, breaks, or is silent for long."""
    import aiohttp

    async def receive() -> None:
        texts = client.tail_job_logs(job)
        while True:
            log.add(await asyncio.wait_for(anext(texts), SILENCE))

    log.restart()
    with contextlib.suppress(aiohttp.ClientError, OSError, RuntimeError, StopAsyncIteration):
        asyncio.run(receive())


def _details(client: JobSubmissionClient, job: str) -> JobDetails:
    """Return a job's details, as soon as the job server answers."""
    start = time.monotonic()
    while True:
        try:
            with explain_cluster_errors():
                return client.get_job_info(job)
        except Unreachable as error:
            waited = time.monotonic() - start
            if error.refused and waited > REFUSED:
                raise RaypflError(
                    "The cluster's head has died or was stopped: its machine answers, but nothing listens at the job "
                    "server's port. The job has ended with it; submit it again to a new cluster, where the same "
                    "command continues from the newest checkpoint if `output` outlived the head."
                ) from error
            if waited > PATIENCE:
                raise RaypflError(
                    f"The cluster has not answered for {PATIENCE / 60:g} minutes. The job may still run, or be gone "
                    "with the cluster."
                ) from error
            time.sleep(POLL)
