"""The job server of a Ray cluster: its address, its client, and its errors as sentences."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from raypfl.common.errors import ConfigError, RaypflError
from raypfl.engine.backends.cluster import token_error

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

_ADDRESS_VARIABLES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
"""Environment variables that may have an address, beside ``--address``. In Ray both win over an address argument."""

_TALKATIVE_LOGGERS = (
    "ray.dashboard.modules.dashboard_sdk",
    "ray.dashboard.modules.job.sdk",
    "ray._private.runtime_env.packaging",
)


def client(address: str | None) -> JobSubmissionClient:
    """Return a client of the job server of a cluster.

    Parameters
    ----------
    address : the address of the cluster's dashboard (``http://HEAD:8265``) or head (``HEAD:6379``); None:
        ``$RAY_API_SERVER_ADDRESS``, else ``$RAY_ADDRESS``.

    Raises
    ------
    ConfigError : if no address is named, no job server answers there, or it refuses the token.
    """
    address = address or next((os.environ[name] for name in _ADDRESS_VARIABLES if os.environ.get(name)), None)
    if address is None:
        raise ConfigError("No cluster is named: give --address http://HEAD:8265, or set RAY_ADDRESS.")

    # Given an explicit address, Ray does not switch token authentication on by itself.
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    from ray.job_submission import JobSubmissionClient

    for name in _TALKATIVE_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)

    hidden = {name: os.environ.pop(name) for name in _ADDRESS_VARIABLES if name in os.environ}
    try:
        with explain_cluster_errors(address):
            return JobSubmissionClient(address)
    finally:
        os.environ.update(hidden)


@contextmanager
def explain_cluster_errors(address: str = "") -> Iterator[None]:
    """While active, turn errors of Ray's job server into raypfl's, each a sentence."""
    import ray
    import requests

    where = f" at {address}" if address else ""
    try:
        yield
    except ray.exceptions.AuthenticationError as error:
        raise token_error(where, error) from error
    except (requests.RequestException, ConnectionError, ray.exceptions.RayError) as error:
        raise Unreachable(
            f"No Ray job server answers{where}. Is the cluster running, with its dashboard, and can its port (8265, "
            "unless another was chosen) be reached from here?",
            refused="refused" in str(error).lower(),
        ) from error
    except (RuntimeError, ValueError) as error:
        if isinstance(error, RaypflError):
            raise
        raise ConfigError(f"The cluster{where} refuses: {_reason(error)}") from error


class Unreachable(ConfigError):
    """Error for a job server that does not answer.

    Attributes
    ----------
    refused : whether the server's machine answers, and says that nothing listens at the port.
    """

    def __init__(self, message: str, refused: bool = False):
        super().__init__(message)
        self.refused = refused


def _reason(error: BaseException) -> str:
    """Return the last line of a server's traceback, or the first line of any other text."""
    text = re.sub(r"^Request failed with status code \d+: ", "", str(error).strip())
    lines = text.splitlines() or [type(error).__name__]
    return lines[-1] if "Traceback" in text else lines[0]
