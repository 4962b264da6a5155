"""Following a job: its log as it is written, however often the stream breaks, and its exit code at the end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from raypfl.common.errors import RaypflError
from raypfl.integrations.jobs.cluster import Unreachable, sentences

if TYPE_CHECKING:
    from ray.job_submission import JobDetails, JobSubmissionClient

POLL = 1.0
"""Seconds between looks at a job whose log has ended."""
SILENCE = 60.0
"""Seconds without a word after which a log's stream is opened again: a connection may be lost without an end."""
PATIENCE = 300.0
"""Seconds to wait for a job server that does not answer."""
REFUSED = 15.0
"""Seconds to wait if its machine answers that nothing listens there: the head's processes are gone."""
STOPPED = 130
"""The exit code of a job that was stopped: what a shell expects after Ctrl-C."""

Show = Callable[[str], None]


def follow(client: JobSubmissionClient, job: str, show: Show) -> JobDetails:
    """Show a job's log until it has ended; returns how.

    Ray's stream of a log may end while the job runs, and begins from the start when it is opened again.

    Parameters
    ----------
    show : is called with each new piece of the log.

    Raises
    ------
    RaypflError : if the job server does not answer for `PATIENCE` seconds.
    """
    log = _Log(show)
    while True:
        _tail(client, job, log)
        details = _details(client, job)
        if details.status.is_terminal():
            with contextlib.suppress(RaypflError), sentences():  # what a broken stream has not brought
                log.restart()
                log.add(client.get_job_logs(job))
            return details
        time.sleep(POLL)


def wait(client: JobSubmissionClient, job: str) -> JobDetails:
    """How a job ended, once it has."""
    while not (details := _details(client, job)).status.is_terminal():
        time.sleep(POLL)
    return details


def exit_code(details: JobDetails) -> int:
    """The exit code of a job's command; 130 if it was stopped, and 128 + N if signal N killed it."""
    status = details.status.value
    if status == "STOPPED":
        return STOPPED
    code = details.driver_exit_code or int(status == "FAILED")
    return code if code >= 0 else 128 - code


class _Log:
    """Shows what is new in a text that comes from its start again and again."""

    def __init__(self, show: Show):
        self._show = show
        self._shown = self._received = 0

    def restart(self) -> None:
        self._received = 0

    def add(self, text: str) -> None:
        new = text[max(0, self._shown - self._received) :]
        self._received += len(text)
        self._shown = max(self._shown, self._received)
        if new:
            self._show(new)


def _tail(client: JobSubmissionClient, job: str, log: _Log) -> None:
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
    since = time.monotonic()
    while True:
        try:
            with sentences():
                return client.get_job_info(job)
        except Unreachable as error:
            waited = time.monotonic() - since
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
