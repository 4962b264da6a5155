"""The client of a served run: a model for its samples, which stay with it if the method is PeFLL."""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
import urllib.error
import urllib.request
from functools import cached_property
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from raypfl.common.errors import ConfigError, DataError, RaypflError
from raypfl.common.files import write
from raypfl.data.datasets.raw_data import as_array, class_numbers
from raypfl.trained.saved_model import load_model
from raypfl.trained.serving.embedder import Embedder, read_embedder
from raypfl.trained.trained_model import TrainedModel

TRIES = 10
"""Requests to a service that answers "later" each time, before it is given up."""

JSON = "application/json"
BINARY = "application/octet-stream"


class RemoteRun:
    """A run that ``raypfl serve`` serves, for a client with labelled samples.

    Parameters
    ----------
    address : the address of the service, such as ``http://127.0.0.1:8000``.
    token : the token of the service.
    timeout : the time to wait for an answer, in seconds.

    Examples
    --------
    ``raypfl.RemoteRun("http://127.0.0.1:8000", token).personalize(x, y)(images)`` gives logits.
    """

    def __init__(self, address: str, token: str, timeout: float = 150.0):
        self.address = address.rstrip("/")
        self.timeout = timeout
        self._token = token

    @cached_property
    def about(self) -> dict[str, Any]:
        """The run's method, inputs, classes and paths, and the service's limits."""
        answer = self._request("/")
        with contextlib.suppress(ValueError):
            about = json.loads(answer)
            if isinstance(about, dict) and {"method", "class_names", "paths"} <= about.keys():
                return about
        raise RaypflError(f"{self.address} answers, but is not a run that `raypfl serve` serves.")

    def personalize(self, x: Any, y: Any, file: str | Path | None = None, upload: bool = False) -> TrainedModel:
        """Return a model for a client with these samples.

        If the run's method is PeFLL, the client gets the embedding network, and sends nothing but its descriptor.

        Parameters
        ----------
        x : ``[n, ...]``, the samples, as the run's data set has them.
        y : the targets of the samples: numbers, or names of classes.
        file : a file for the model, for :func:`raypfl.load_model`; None: none is written.
        upload : whether to send the samples themselves, which other methods need in order to train.

        Raises
        ------
        ConfigError : if the method needs the samples and `upload` is false, or the other way round.
        DataError : if the samples do not fit the run.
        RaypflError : if the service cannot be reached, or refuses.
        """
        x = as_array(x, "x")
        y = as_array(y, "y")
        if self.about["class_names"] is not None:
            y = class_numbers(y, self.about["class_names"])
        if "/embedding" in self.about["paths"]:
            if upload:
                raise ConfigError(
                    "This service takes no samples: its method needs the descriptor only. Leave out upload."
                )
            descriptor = self._embedder.descriptor(x, y)
            model = self._request("/model", json.dumps({"descriptor": descriptor.tolist()}).encode(), JSON)
        else:
            if not upload:
                raise ConfigError(
                    f"{self.about['method']} trains on the client's samples, so the service needs them. Pass "
                    "upload=True to send them, or run `raypfl personalize` where the run and the samples are."
                )
            samples = {"x": np.ascontiguousarray(x), "y": np.ascontiguousarray(y)}
            try:
                body = safetensors.numpy.save(samples)
            except safetensors.SafetensorError as error:  # such as text or complex numbers
                raise DataError(f"x is {x.dtype} and y is {y.dtype}; these cannot be sent: {error}") from error
            model = self._request("/personalize?held_out=0", body, BINARY)

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "model.safetensors") if file is None else Path(file)
            write(path, model)
            return load_model(path)

    @cached_property
    def _embedder(self) -> Embedder:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "embedding.safetensors")
            path.write_bytes(self._request("/embedding"))
            return read_embedder(path)

    def _request(self, path: str, body: bytes | None = None, media: str = JSON) -> bytes:
        """Return the answer to a GET or, with a body, a POST. A busy service is asked again."""
        headers = {"Authorization": f"Bearer {self._token.strip()}"}
        if body is not None:
            headers["Content-Type"] = media

        for tries_left in reversed(range(TRIES)):
            try:
                request = urllib.request.Request(self.address + path, body, headers)
                with urllib.request.urlopen(request, timeout=self.timeout) as answer:
                    return answer.read()
            except urllib.error.HTTPError as error:
                later = error.headers.get("Retry-After", "")
                if not (error.code == 503 and later.isdecimal() and tries_left):
                    raise RaypflError(f"{self.address} answers {error.code}: {_sentence(error.read())}") from error
                time.sleep(int(later))
            except (OSError, HTTPException) as error:
                # urllib's own text wraps the reason in "<urlopen error ...>".
                reason = getattr(error, "reason", error)
                raise RaypflError(f"{self.address} cannot be asked for a model: {reason}") from error
            except ValueError as error:
                raise RaypflError(
                    f"The address {self.address!r} or the token cannot be part of a request: {error}. An address is "
                    "like http://127.0.0.1:8000, and a token one line in ASCII."
                ) from error
        raise AssertionError("The last try returns or raises.")


def _sentence(body: bytes) -> str:
    """Return why a request was refused."""
    try:
        return json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
