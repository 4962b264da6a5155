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

from raypfl.common.counting import series
from raypfl.common.errors import ConfigError, DataError, RaypflError
from raypfl.engine.backends.cluster import connected
from raypfl.engine.backends.session import spare_server
from raypfl.experiment.settings import RaySettings
from raypfl.methods import METHODS
from raypfl.trained.models import TrainedModels
from raypfl.trained.new_clients import checked_inputs, class_names, require_new_client_models
from raypfl.trained.saved_model import encoded
from raypfl.trained.serving.model_makers import ClientModel, model_maker_of

BATCH = 8
"""The largest number of clients whose models are made together."""

WAIT = 0.01
"""Seconds that the first client of a batch waits for others."""

TIMEOUT = 120.0
"""Seconds that a request's body may take to arrive, and then its model to be made."""

PLACES = 8 * BATCH
"""The largest number of requests that wait for a model in one replica."""

RETRY = 1
"""Seconds after which a client that was refused because others are waiting may ask again."""

PREDICT = "/predict"

APP = "raypfl"


@dataclass(frozen=True)
class RequestLimits:
    """Limits of one request.

    Attributes
    ----------
    megabytes : the largest size of its body.
    samples : the largest number of samples in it.
    """

    megabytes: float = 10.0
    samples: int = 1000


class _Refused(Exception):
    """A request that is answered with an HTTP status and a sentence."""

    def __init__(self, status: int, sentence: str, **headers: str):
        super().__init__(sentence)
        self.status = status
        self.headers = headers


@dataclass(frozen=True)
class _Query:
    """A request for a model or its predictions.

    Attributes
    ----------
    client : what the model is made from, as :meth:`ModelMaker.checked` returns it.
    inputs : the inputs to predict for; None: the request is for the model itself.
    """

    client: Any
    inputs: torch.Tensor | None


class Service:
    """Answers requests, each of which must have the header ``Authorization: Bearer TOKEN``.

    ``GET /`` gives the method, the inputs, the classes, the paths and the limits as JSON. A run of PeFLL has ``GET
    /embedding``, its embedding network, and ``POST /model``, which takes a ``descriptor``. Runs whose methods train for
    a new client have ``POST /personalize?held_out=0.25``, which takes its samples ``x`` and ``y``. Both give the
    client's model, which :func:`raypfl.load_model` reads. ``POST /predict`` takes ``inputs`` as well, and gives that
    model's predictions for them as JSON.

    Bodies are JSON, if their ``Content-Type`` says so, or safetensors. A refusal is JSON: ``{"error": sentence}``.

    Parameters
    ----------
    run_dir : the folder of the run.
    """

    def __init__(self, run_dir: str, token: str, limits: RequestLimits):
        torch.set_num_threads(1)
        self._models = TrainedModels.of_run(run_dir, whole=False)
        self._maker = model_maker_of(self._models)
        self._token = token.encode()
        self._limits = limits
        files = dict.fromkeys(self._maker.files, "GET")
        self._allowed = {"/": "GET", **files, self._maker.path: "POST", PREDICT: "POST"}
        self._busy = 0  # requests that wait for a model

    async def __call__(self, request: Request) -> Response:
        try:
            return await self._respond(request)
        except _Refused as refused:
            return JSONResponse({"error": str(refused)}, refused.status, refused.headers)
        except ClientDisconnect:
            # The client is gone, so nobody reads this response.
            return Response(status_code=400)
        except Exception:
            logging.getLogger("ray.serve").exception("A request failed.")
            return JSONResponse({"error": "The server failed at this request; its log says why."}, 500)

    async def _respond(self, request: Request) -> Response:
        path = request.url.path
        self._require_token(request)
        self._refuse_wrong_path(path, request.method)
        if path == "/":
            return JSONResponse(self._about())
        if path in self._maker.files:
            return Response(self._maker.files[path], media_type="application/octet-stream")

        with self._waiting_place():
            query = await self._read_query(request)
            try:
                answer = await asyncio.wait_for(self._answer_in_batch(query), TIMEOUT)
            except TimeoutError:
                raise _later(f"There was no model within {TIMEOUT:g} seconds.") from None
        if isinstance(answer, RaypflError):
            raise _Refused(400, str(answer))
        if isinstance(answer, bytes):
            return Response(answer, media_type="application/octet-stream")
        return JSONResponse(answer)

    def _require_token(self, request: Request) -> None:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(token.strip().encode(), self._token):
            header = {"WWW-Authenticate": "Bearer"}
            raise _Refused(401, "The header Authorization must be: Bearer, and the service's token.", **header)

    def _refuse_wrong_path(self, path: str, method: str) -> None:
        if path not in self._allowed:
            paths = series(f"{allowed} {name}" for name, allowed in self._allowed.items())
            raise _Refused(404, f"There is {paths}, nothing else.")
        allowed = self._allowed[path]
        if method != allowed:
            raise _Refused(405, f"{path} takes {allowed}, not {method}.", Allow=allowed)

    @contextlib.contextmanager
    def _waiting_place(self) -> Iterator[None]:
        """While active, occupy one of the places for requests that wait for a model."""
        if self._busy >= PLACES:
            raise _later(f"{PLACES} requests are waiting already.")
        self._busy += 1
        try:
            yield
        finally:
            self._busy -= 1

    def _about(self) -> dict[str, Any]:
        experiment = self._models.experiment
        outline = self._models.outline
        return {
            "method": METHODS.name_of(type(experiment.method)),
            "round": self._models.round,
            "input_shape": list(outline.input_shape),
            "full_pixel": outline.scale,
            "targets": outline.kind,
            "classes": outline.num_classes,
            "class_names": class_names(outline),
            "feature_names": getattr(outline, "feature_names", None),
            "vocabulary": getattr(outline, "vocabulary", None),
            "paths": self._allowed,
            "limits": asdict(self._limits),
        }

    async def _read_query(self, request: Request) -> _Query:
        held_out = _held_out(request)
        try:
            body = await asyncio.wait_for(self._body(request), TIMEOUT)
        except TimeoutError:
            raise _Refused(408, f"The body did not arrive within {TIMEOUT:g} seconds.") from None

        predicts = request.url.path == PREDICT
        names = (*self._maker.arrays, "inputs") if predicts else self._maker.arrays
        arrays = self._arrays(request, body, names)
        try:
            client = self._maker.checked(arrays, held_out)
            inputs = None
            if predicts:
                inputs = torch.from_numpy(checked_inputs(arrays["inputs"], self._models.outline, "inputs"))
        except RaypflError as error:
            raise _Refused(400, str(error)) from error
        return _Query(client, inputs)

    async def _body(self, request: Request) -> bytes:
        """Return the request's body, of which no more is read than is allowed."""
        limit = int(self._limits.megabytes * 1e6)
        too_large = _Refused(413, f"The body is larger than {self._limits.megabytes:g} MB.")
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length) > limit:
            raise too_large

        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > limit:
                raise too_large
        return bytes(body)

    def _arrays(self, request: Request, body: bytes, names: tuple[str, ...]) -> dict[str, np.ndarray]:
        """Return the arrays in a body, which must have these names."""
        is_json = request.headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"
        arrays = _of_json(body) if is_json else _of_safetensors(body)
        if arrays.keys() != set(names):
            names_in_body = ", ".join(sorted(arrays)) or "none"
            raise _Refused(400, f"The body must have {' and '.join(names)}, nothing else; it has: {names_in_body}.")

        for name, array in arrays.items():
            if name != "descriptor" and len(np.atleast_1d(array)) > self._limits.samples:
                raise _Refused(413, f"There are more than {self._limits.samples} samples in {name}.")
        return arrays

    @serve.batch(max_batch_size=BATCH, batch_wait_timeout_s=WAIT)
    async def _answer_in_batch(self, queries: list[_Query]) -> list[bytes | dict[str, Any] | RaypflError]:
        return await asyncio.to_thread(self._answer_all, queries)

    def _answer_all(self, queries: list[_Query]) -> list[bytes | dict[str, Any] | RaypflError]:
        """Return a model's file or its predictions for each query, or why there is none."""
        models = self._maker.make([query.client for query in queries])
        return [self._answer(query, model) for query, model in zip(queries, models, strict=True)]

    def _answer(self, query: _Query, model: ClientModel | RaypflError) -> bytes | dict[str, Any] | RaypflError:
        if isinstance(model, RaypflError):
            return model
        if query.inputs is None:
            return encoded(model.model, self._models.origin, model.facts)

        try:
            with torch.no_grad():
                outputs = model.model(query.inputs)
        except (IndexError, RuntimeError) as error:  # such as a token that the network does not know
            return DataError(f"The model cannot predict for these inputs: {error}")
        if not outputs.isfinite().all():
            return DataError("The model's outputs for these inputs are not finite.")

        answer: dict[str, Any] = {"outputs": outputs.tolist()}
        if self._models.outline.kind == "classes":
            names = class_names(self._models.outline) or []
            answer["predictions"] = [names[number] for number in outputs.argmax(-1).tolist()]
        return answer


def _later(sentence: str) -> _Refused:
    """Return a refusal of a request that may be sent again."""
    return _Refused(503, f"{sentence} Send the request again later.", **{"Retry-After": str(RETRY)})


def _of_safetensors(body: bytes) -> dict[str, np.ndarray]:
    try:
        return safetensors.numpy.load(body)
    except KeyError as error:
        raise _Refused(400, f"The body has an array of the type {error}, which NumPy lacks; send float32.") from error
    except (safetensors.SafetensorError, TypeError, ValueError) as error:
        raise _Refused(
            400, f"The body is not safetensors, as a body without Content-Type: application/json must be: {error}"
        ) from error


def _of_json(body: bytes) -> dict[str, np.ndarray]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise _Refused(400, f"The body is not JSON, as its Content-Type says: {error}") from error
    if not isinstance(value, dict):
        raise _Refused(400, "The body must be a JSON object with a list for each name.")
    try:
        return {name: np.asarray(part) for name, part in value.items()}
    except (ValueError, RecursionError, OverflowError) as error:
        raise _Refused(400, f"The lists in the body are not arrays of numbers: {error}") from error


def _held_out(request: Request) -> float | None:
    options = request.query_params.multi_items()
    if not options:
        return None
    if [name for name, _ in options] != ["held_out"]:
        names = series(json.dumps(name) for name, _ in options)
        raise _Refused(400, f"The query has {names}; it may have held_out, once, and nothing else.")
    ((_, text),) = options
    with contextlib.suppress(ValueError):
        share = float(text)
        if 0 <= share < 1 and math.isfinite(share):
            return share
    raise _Refused(400, f"held_out is {json.dumps(text)}, but must be a number of at least 0 and below 1.")


@contextlib.contextmanager
def served(run: Path, token: str, host: str, port: int, replicas: int, limits: RequestLimits) -> Iterator[str]:
    """While active, serve models for new clients over HTTP; yield the address.

    Raises
    ------
    ConfigError : if the method makes no models for new clients, or the port is taken.
    """
    models = TrainedModels.of_run(run, whole=False)
    require_new_client_models(models.experiment)
    _refuse_taken(host, port)
    deployed = serve.deployment(
        num_replicas=replicas,
        max_ongoing_requests=2 * PLACES,  # so that the replica itself refuses surplus requests, in JSON
        ray_actor_options={"num_cpus": 1},
    )(Service)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)  # in this process; `quiet` is for Serve's own

    with connected(RaySettings()) as ray:
        spare_server.release(ray)
        http = {"host": host, "port": port, "request_timeout_s": 2 * TIMEOUT + 60}
        quiet = {"log_level": "ERROR", "enable_access_log": False}
        try:
            serve.start(proxy_location="HeadOnly", http_options=http, logging_config=quiet)
            application = deployed.bind(str(run.absolute()), token, limits)
            target = serve.RunTarget(application, name=APP, route_prefix="/", logging_config=quiet)
            serve.run_many([target], wait_for_applications_running=False)
            _wait_until_running()
            yield f"http://{f'[{host}]' if ':' in host else host}:{port}"
        finally:
            serve.shutdown()


def _wait_until_running() -> None:
    """Wait until the service runs; raise a ConfigError if it cannot start."""
    deadline = time.monotonic() + TIMEOUT
    while True:
        state = serve.status().applications[APP]
        if state.status == "RUNNING":
            return
        if state.status == "DEPLOY_FAILED" or time.monotonic() > deadline:
            reasons = [deployment.message for deployment in state.deployments.values()] + [state.message]
            raise ConfigError(
                "The service did not start; each of its replicas needs a free CPU. "
                f"Ray Serve says: {' '.join(filter(None, reasons)) or state.status}"
            )
        time.sleep(0.1)


def _refuse_taken(host: str, port: int) -> None:
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except OSError as error:
        raise ConfigError(f"{host}:{port} cannot be listened on: {error}. Choose another --port or --host.") from error
