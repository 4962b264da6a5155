"""Models for new clients over HTTP, through Ray Serve."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import math
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
import torch
from ray import serve
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from raypfl.backends.cluster import connected
from raypfl.common.errors import ConfigError, RaypflError
from raypfl.config.settings import RaySettings
from raypfl.methods import METHODS
from raypfl.runs.driver import make_room
from raypfl.runs.result import newest
from raypfl.trained.models import TrainedModels
from raypfl.trained.new_clients import Labelled, checked, refuse_without_way
from raypfl.trained.saved_model import encoded

BATCH = 8
"""Clients whose models are made together, at most."""

WAIT = 0.01
"""Seconds that the first of them waits for others."""

TIMEOUT = 120.0
"""Seconds after which a request is given up."""

APP = "raypfl"


@dataclass(frozen=True)
class Limits:
    """What one request may ask for.

    Attributes
    ----------
    megabytes : of its body. samples : in it.
    """

    megabytes: float = 10.0
    samples: int = 1000


class _Refused(Exception):
    """A request that is answered with an HTTP status and a sentence."""

    def __init__(self, status: int, sentence: str, **headers: str):
        super().__init__(sentence)
        self.status, self.headers = status, headers


class Service:
    """Answers requests, each of which must have the header ``Authorization: Bearer TOKEN``.

    ``GET /`` gives the method, the inputs and the limits as JSON. ``POST /personalize?held_out=0.25`` takes a client's
    samples ``x`` and ``y`` as safetensors and gives its model, which :func:`raypfl.load_model` reads. A refusal is
    JSON: ``{"error": sentence}``.

    Parameters
    ----------
    run_dir : the folder of the run.
    """

    def __init__(self, run_dir: str, token: str, limits: Limits):
        torch.set_num_threads(1)
        self._models = TrainedModels.of_snapshot(*newest(run_dir, whole=False))
        self._token, self._limits = token.encode(), limits

    async def __call__(self, request: Request) -> Response:
        try:
            return await self._answered(request)
        except _Refused as refused:
            return JSONResponse({"error": str(refused)}, refused.status, refused.headers)
        except ClientDisconnect:
            return Response(status_code=400)  # which nobody reads
        except Exception:
            logging.getLogger("ray.serve").exception("A request failed.")
            return JSONResponse({"error": "The server failed at this request; its log says why."}, 500)

    async def _answered(self, request: Request) -> Response:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(token.strip().encode(), self._token):
            header = {"WWW-Authenticate": "Bearer"}
            raise _Refused(401, "The header Authorization must be: Bearer, and the service's token.", **header)
        if request.url.path not in ("/", "/personalize"):
            raise _Refused(404, "There is GET / and POST /personalize, nothing else.")
        allowed = "GET" if request.url.path == "/" else "POST"
        if request.method != allowed:
            raise _Refused(405, f"{request.url.path} takes {allowed}, not {request.method}.", Allow=allowed)
        if allowed == "GET":
            return JSONResponse(self._about())
        held_out = _held_out(request)
        model = await self._made((self._samples(await self._body(request)), held_out))
        if isinstance(model, RaypflError):
            raise _Refused(400, str(model))
        return Response(model, media_type="application/octet-stream")

    def _about(self) -> dict[str, Any]:
        experiment, outline = self._models.experiment, self._models.outline
        return {
            "method": METHODS.name_of(type(experiment.method)),
            "round": self._models.round,
            "input_shape": list(outline.input_shape),
            "full_pixel": outline.scale,
            "targets": outline.kind,
            "classes": outline.num_classes,
            "limits": asdict(self._limits),
        }

    async def _body(self, request: Request) -> bytes:
        """The request's body, of which no more is read than is allowed."""
        most = int(self._limits.megabytes * 1e6)
        too_large = _Refused(413, f"The body is larger than {self._limits.megabytes:g} MB.")
        if int(length if (length := request.headers.get("content-length", "")).isdecimal() else 0) > most:
            raise too_large
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > most:
                raise too_large
        return bytes(body)

    def _samples(self, body: bytes) -> Labelled:
        try:
            arrays = safetensors.numpy.load(body)
        except (safetensors.SafetensorError, KeyError, TypeError, ValueError) as error:
            raise _Refused(400, f"The body is not safetensors with arrays x and y: {error}") from error
        if arrays.keys() != {"x", "y"}:
            there = ", ".join(sorted(arrays)) or "none"
            raise _Refused(400, f"The body must have the arrays x and y; its arrays are: {there}.")
        if len(np.atleast_1d(arrays["x"])) > self._limits.samples:
            raise _Refused(413, f"There are more than {self._limits.samples} samples.")
        try:
            return checked(arrays["x"], arrays["y"], self._models.outline)
        except RaypflError as error:
            raise _Refused(400, str(error)) from error

    @serve.batch(max_batch_size=BATCH, batch_wait_timeout_s=WAIT)
    async def _made(self, asked: list[tuple[Labelled, float]]) -> list[bytes | RaypflError]:
        return await asyncio.to_thread(self._make, asked)

    def _make(self, asked: list[tuple[Labelled, float]]) -> list[bytes | RaypflError]:
        """A model for each, or why there is none; those that hold out the same share are made together."""
        made: dict[int, bytes | RaypflError] = {}
        for held_out in dict.fromkeys(share for _, share in asked):
            those = [i for i, (_, share) in enumerate(asked) if share == held_out]
            made |= dict(zip(those, self._together([asked[i][0] for i in those], held_out), strict=True))
        return [made[i] for i in range(len(asked))]

    def _together(self, samples: list[Labelled], held_out: float) -> list[bytes | RaypflError]:
        try:
            models = self._models.personalize_all(samples, held_out)
        except RaypflError as error:
            if len(samples) == 1:
                return [error]
            return [self._together([one], held_out)[0] for one in samples]  # the others can do without it
        return [encoded(one.model, one.origin, one.facts) for one in models]


def _held_out(request: Request) -> float:
    given = request.query_params.get("held_out", "0.25")
    with contextlib.suppress(ValueError):
        if 0 <= (share := float(given)) < 1 and math.isfinite(share):
            return share
    raise _Refused(400, f"held_out is {json.dumps(given)}, but must be a number of at least 0 and below 1.")


@contextlib.contextmanager
def served(run: Path, token: str, host: str, port: int, replicas: int, limits: Limits) -> Iterator[str]:
    """While active, a run makes models over HTTP; gives the address.

    Raises
    ------
    ConfigError : if the method has no way to make models for new clients, or the port is taken.
    """
    models = TrainedModels.of_snapshot(*newest(run, whole=False))
    refuse_without_way(models.experiment.method)
    _refuse_taken(host, port)
    deployed = serve.deployment(
        num_replicas=replicas,
        max_ongoing_requests=2 * BATCH,
        max_queued_requests=8 * BATCH,
        ray_actor_options={"num_cpus": 1},
    )(Service)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)  # in this process; `quiet` is for Serve's own
    with connected(RaySettings()) as ray:
        make_room(ray)
        http = {"host": host, "port": port, "request_timeout_s": TIMEOUT}
        quiet = {"log_level": "ERROR", "enable_access_log": False}
        try:
            serve.start(proxy_location="HeadOnly", http_options=http, logging_config=quiet)
            application = deployed.bind(str(run.absolute()), token, limits)
            target = serve.RunTarget(application, name=APP, route_prefix="/", logging_config=quiet)
            serve.run_many([target], wait_for_applications_running=False)
            _wait_until_running()
            yield f"http://{host}:{port}"
        finally:
            serve.shutdown()


def _wait_until_running() -> None:
    """Return once the service runs; raises a ConfigError if it cannot start."""
    deadline = time.monotonic() + TIMEOUT
    while (state := serve.status().applications[APP]).status != "RUNNING":
        if state.status == "DEPLOY_FAILED" or time.monotonic() > deadline:
            reasons = [one.message for one in state.deployments.values()] + [state.message]
            raise ConfigError(
                "The service did not start; each of its replicas needs a free CPU. "
                f"Ray Serve says: {' '.join(filter(None, reasons)) or state.status}"
            )
        time.sleep(0.1)


def _refuse_taken(host: str, port: int) -> None:
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(address)
    except OSError as error:
        raise ConfigError(f"{host}:{port} cannot be listened on: {error}. Choose another --port or --host.") from error
