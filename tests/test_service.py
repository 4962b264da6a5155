"""Models for new clients over HTTP: what a client sends and gets, and what bad requests get."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
import safetensors.numpy
import torch
from starlette.requests import Request

import raypfl
from raypfl.common.errors import ConfigError
from raypfl.trained import service
from raypfl.trained.service import Limits, Service
from tests.command import raypfl as raypfl_command
from tests.runs import experiment

TOKEN = "a token of 28 characters here"
X = np.random.default_rng(0).integers(0, 17, (12, 1, 8, 8), dtype=np.uint8)
Y = np.repeat([3, 7], 6)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    return raypfl.run(experiment(folder, method="pefll", rounds=2, evaluation__every=0)).run_dir


@pytest.fixture(scope="module")
def one(run_dir: Path) -> Service:
    return Service(str(run_dir), TOKEN, Limits(megabytes=0.05, samples=20))


def body(**arrays: np.ndarray) -> bytes:
    return safetensors.numpy.save(arrays)


def request(
    path: str = "/personalize",
    content: bytes | Iterable[bytes] = b"",
    method: str = "POST",
    token: str = f"Bearer {TOKEN}",
    query: str = "",
    length: int | None = None,
) -> Request:
    parts = [content] if isinstance(content, bytes) else list(content)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    headers = [(b"authorization", token.encode())] * bool(token)
    headers += [(b"content-length", str(length).encode())] * (length is not None)
    scope = {"type": "http", "method": method, "path": path, "query_string": query.encode(), "headers": headers}
    return Request(scope, receive)


def ask(address: str, params: dict[str, Any], content: bytes) -> requests.Response:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    return requests.post(f"{address}/personalize", params=params, data=content, headers=headers, timeout=120)


def refused(one: Service, asked: Request) -> tuple[int, str]:
    answer = asyncio.run(one(asked))
    return answer.status_code, json.loads(bytes(answer.body))["error"]


@pytest.mark.parametrize(
    ("asked", "status", "sentence"),
    [
        ({"token": ""}, 401, "Bearer"),
        ({"token": "Bearer guess"}, 401, "Bearer"),
        ({"token": f"Basic {TOKEN}"}, 401, "Bearer"),
        ({"token": "Bearer \xe4"}, 401, "Bearer"),
        ({"path": "/other"}, 404, "POST /personalize"),
        ({"method": "PUT"}, 405, "takes POST, not PUT"),
        ({"query": "held_out=1"}, 400, "held_out is"),
        ({"query": "held_out=nan"}, 400, "held_out is"),
        ({"content": b"", "length": 10**9}, 413, "larger than 0.05 MB"),
        ({"content": [b"x" * 20_000] * 5}, 413, "larger than 0.05 MB"),
        ({"content": b""}, 400, "not safetensors"),
        ({"content": b"\xff" * 1000}, 400, "not safetensors"),
        ({"content": b"\x80\x04\x95"}, 400, "not safetensors"),
        ({"content": body(x=X)}, 400, "its arrays are: x"),
        ({"content": body(x=np.repeat(X, 2, 0), y=np.repeat(Y, 2))}, 413, "more than 20 samples"),
        ({"content": body(x=np.zeros((), np.uint8), y=np.zeros(1, np.uint8))}, 400, "x has the shape"),
        ({"content": body(x=X, y=Y + 5)}, 400, "there are 10 classes"),
        ({"content": body(x=np.full_like(X, np.inf, np.float32), y=Y)}, 400, "not finite"),
    ],
)
def test_a_bad_request_gets_a_status_and_a_sentence(one: Service, asked: dict, status: int, sentence: str):
    found, said = refused(one, request(**asked))
    assert found == status and sentence in said, said


def test_a_body_that_is_too_large_is_not_read_to_its_end(one: Service):
    def endless() -> Iterable[bytes]:
        for _ in range(5):
            yield b"x" * 20_000
        pytest.fail("more was read")

    asked, parts = request(content=b""), endless()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": next(iter(parts)), "more_body": True}

    asked._receive = receive
    assert refused(one, asked)[0] == 413


def test_requests_that_come_together_are_made_together_and_a_failing_one_fails_alone(
    one: Service, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    calls, personalize_all = [], one._models.personalize_all

    def counted(clients: list, held_out: float) -> list:
        calls.append(len(clients))
        if any((x == 0).all() for x, _ in clients):
            raise ConfigError("No model for this one.")
        return personalize_all(clients, held_out)

    monkeypatch.setattr(one._models, "personalize_all", counted)
    good = [((np.roll(X, i, 0), np.roll(Y, i)), 0.5) for i in range(3)]
    *made, bad = one._make([*good, ((X * 0, Y), 0.5)])
    assert calls == [4, 1, 1, 1, 1]
    assert str(bad) == "No model for this one."
    for answer in made:
        assert isinstance(answer, bytes)
        (tmp_path / "m.safetensors").write_bytes(answer)
        assert raypfl.load_model(tmp_path / "m.safetensors")(torch.from_numpy(X)).shape == (12, 10)
    calls.clear()
    one._make([(samples, share) for samples, share in zip([good[0][0]] * 4, (0.5, 0.25, 0.5, 0.25), strict=True)])
    assert calls == [2, 2]


def test_real_clients_get_their_models_from_ray_serve_until_ctrl_c(
    run_dir: Path, ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    over = threading.Event()

    def visit() -> list[requests.Response]:
        try:
            return visits(f"http://127.0.0.1:{port}", over)
        finally:
            if not over.is_set():
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setenv("RAYPFL_TOKEN", TOKEN)
    with ThreadPoolExecutor(1) as pool:
        visited = pool.submit(visit)
        try:
            done = raypfl_command("serve", str(run_dir), "--port", str(port))
        finally:
            over.set()
        answers = visited.result(timeout=60)
    assert done.exit_code == 130, done.output
    assert "Token: that of $RAYPFL_TOKEN" in done.stdout and TOKEN not in done.output
    assert done.stdout.endswith("Ctrl-C ends it.\nStopping.\n") and done.stderr == "Stopped.\n"
    with pytest.raises(requests.ConnectionError):
        requests.get(f"http://127.0.0.1:{port}", timeout=10)
    assert [one.status_code for one in answers] == [200] * 16, answers[0].text
    (tmp_path / "m.safetensors").write_bytes(answers[0].content)
    here = raypfl.trained_models(run_dir).personalize(X, Y, held_out=0.5)
    images = torch.from_numpy(X)
    torch.testing.assert_close(raypfl.load_model(tmp_path / "m.safetensors")(images), here.model(images))


def visits(address: str, over: threading.Event) -> list[requests.Response]:
    """What sixteen clients get, eight at a time, once there is a service at the address."""
    session = requests.Session()
    for _ in range(600):
        with contextlib.suppress(requests.ConnectionError):
            if session.post(f"{address}/personalize", data=body(x=X, y=Y), timeout=60).status_code == 401:
                break
        assert not over.wait(0.2), "The service did not start."
    session.headers["Authorization"] = f"Bearer {TOKEN}"
    assert session.get(address, timeout=60).json()["input_shape"] == [1, 8, 8]
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, address, {"held_out": 0.5}, body(x=X, y=Y)) for _ in range(16)]
    too_large = session.post(f"{address}/personalize", data=b"x" * 10_000_001, timeout=60)
    assert (too_large.status_code, too_large.json()["error"]) == (413, "The body is larger than 10 MB.")
    with pytest.raises(ConfigError, match="cannot be listened on"):
        service._refuse_taken("127.0.0.1", int(address.rpartition(":")[2]))
    return [one.result() for one in asked]


def test_a_method_without_a_way_is_refused_before_anything_starts(tmp_path: Path):
    run = raypfl.run(experiment(tmp_path, method="fedavg", rounds=1, evaluation__every=0)).run_dir
    with (
        pytest.raises(ConfigError, match="FedAvg has no way"),
        service.served(run, TOKEN, "127.0.0.1", 8765, replicas=1, limits=Limits()),
    ):
        pass
