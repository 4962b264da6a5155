"""`raypfl submit`, `jobs`, `logs` and `stop`: jobs on a Ray cluster, through Ray's job server."""

from __future__ import annotations

import json
import re
import secrets
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from raypfl.common.stopping import signals_interrupt
from raypfl.common.user_modules import copy_files
from raypfl.integrations.jobs import package
from raypfl.integrations.jobs.cluster import client, explain_cluster_errors
from raypfl.integrations.jobs.description import Description
from raypfl.integrations.jobs.following import STOPPED, exit_code, follow, wait
from raypfl.results.display.fitting import ProgressConsole, fit_table, output

if TYPE_CHECKING:
    from ray.job_submission import JobDetails, JobSubmissionClient

STOP_SECONDS = 60
"""Time in which a stopped job saves its rounds; Ray's default of three seconds is too short."""


def submit(
    kind: str, words: Sequence[str], description: Description, run_dir: Path | None, address: str | None, detach: bool
) -> int:
    """Submit `raypfl KIND WORDS` as a job, follow it, and return its exit code.

    Parameters
    ----------
    description : the run, sweep or study that the words describe.
    run_dir : the folder of the run, if the words name it.
    detach : return 0 as soon as the job is submitted.

    Raises
    ------
    ConfigError : if the job cannot work: its results would be lost, or its files are too large.
    """
    description.refuse_lost_paths(run_dir)
    files = package.collect(description.files, description.modules)
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", description.name)
    job = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    words = [package.inside(word) if word in description.files else word for word in words]
    if kind == "run" and run_dir is None:
        run_dir = Path(description.output, job)
        words += ["--run-dir", str(run_dir)]

    cluster = client(address)
    with tempfile.TemporaryDirectory() as folder, explain_cluster_errors():
        copy_files(files, Path(folder))
        cluster.submit_job(
            entrypoint=shlex.join(["exec", "python", "-m", "raypfl", kind, *words]),  # exec: signals reach raypfl
            submission_id=job,
            runtime_env={"working_dir": folder, "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_SECONDS)}},
        )

    console = ProgressConsole()
    results = run_dir or Path(description.output, description.name)
    _print(console, f"Submitted {job} with {package.listed(files)}. Results: {results}")
    if detach:
        _print(console, _how_to_continue(job, address))
        return 0
    return _follow(cluster, job, address, console)


def jobs(address: str | None, as_json: bool) -> None:
    """List the submitted jobs of a cluster, newest first."""
    cluster = client(address)
    with explain_cluster_errors():
        submitted = [details for details in cluster.list_jobs() if details.submission_id]
    submitted.sort(key=lambda details: -(details.start_time or 0))
    rows = [_row(details) for details in submitted]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    console = output()
    console.print(_table(rows, console.width) if rows else "No jobs.")


def logs(job: str, address: str | None, following: bool) -> int:
    """Print a job's log and return 0; with `following`, print until the job ends and return its exit code."""
    cluster = client(address)
    if following:
        return _follow(cluster, job, address, ProgressConsole())
    with explain_cluster_errors():
        print(cluster.get_job_logs(job), end="")
    return 0


def stop(job: str, address: str | None) -> None:
    """Stop a job and wait until it has saved its rounds."""
    cluster = client(address)
    with explain_cluster_errors():
        was_running = cluster.stop_job(job)
    status = wait(cluster, job).status.value
    remark = "" if was_running else " (it had already ended)"
    print(f"{job}: {status}{remark}")


def _follow(cluster: JobSubmissionClient, job: str, address: str | None, console: Console) -> int:
    try:
        with signals_interrupt():
            details = follow(cluster, job, _show)
    except KeyboardInterrupt:
        _print(console, f"No longer following; the job continues. {_how_to_continue(job, address)}", "yellow")
        return STOPPED
    code = exit_code(details)
    if code == STOPPED:
        _print(console, f"The job {job} was stopped. Submitted again with the same run folder, it continues.", "yellow")
    elif details.driver_exit_code is None and code:
        # The command was never started, or its node died.
        _print(console, f"The job {job} failed: {_first_line(details)}", "red")
    elif code:
        _print(console, f"The job {job} ended with exit code {code}.", "red")
    return code


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _how_to_continue(job: str, address: str | None) -> str:
    options = ["--address", address] if address else []
    follow_command = shlex.join(["raypfl", "logs", job, "--follow", *options])
    stop_command = shlex.join(["raypfl", "stop", job, *options])
    return f"Follow it: {follow_command}. Stop it: {stop_command}"


def _first_line(details: JobDetails) -> str:
    return (details.message or "Ray gives no reason.").strip().splitlines()[0]


def _table(rows: Sequence[dict[str, Any]], width: int) -> Table:
    columns = {name: [row[name] for row in rows] for name in ("job", "status", "began")}
    columns["minutes"] = ["" if row["seconds"] is None else f"{row['seconds'] / 60:.1f}" for row in rows]
    columns["command"] = [row["command"] for row in rows]
    return fit_table(width, columns, dispensable=["began", "minutes"], right=["minutes"])[0]


def _row(details: JobDetails) -> dict[str, Any]:
    start = details.start_time  # milliseconds
    seconds = None
    if start:
        end = details.end_time or time.time() * 1000
        seconds = (end - start) / 1000
    return {
        "job": details.submission_id,
        "status": details.status.value,
        "began": time.strftime("%Y-%m-%d %H:%M", time.localtime(start / 1000)) if start else "",
        "seconds": seconds,
        "exit_code": details.driver_exit_code,
        "command": details.entrypoint.removeprefix("exec python -m "),
    }


def _print(console: Console, text: str, colour: str = "") -> None:
    console.print(Text(text, colour), soft_wrap=True)
