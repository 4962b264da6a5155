"""Models for new clients over HTTP: what a client sends and gets, and what bad requests get."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
import safetensors.numpy
import torch
import uvicorn
from starlette.requests import Request

import raypfl
from raypfl.common.errors import ConfigError, RaypflError
from raypfl.models.hypernetworks import EmbeddingNetwork
from raypfl.trained.serving import service
from raypfl.trained.serving.embedder import embedder_file, read_embedder
from raypfl.trained.serving.service import Limits, Service, _Query
from tests.support import datasets
from tests.support.command import raypfl as raypfl_command
from tests.support.pages import blocks
from tests.support.runs import experiment

JSON = "application/json"
TOKEN = "a token of 28 characters here"
X = np.random.default_rng(0).integers(0, 17, (12, 1, 8, 8), dtype=np.uint8)
Y = np.repeat([3, 7], 6)


CLIENT = """
import sys, numpy as np, raypfl
address, token, samples, file = sys.argv[1:]
arrays = np.load(samples)
raypfl.RemoteRun(address, token).personalize(arrays["x"], arrays["y"], file=file)
"""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a method that trains on a new client's samples."""
    folder = tmp_path_factory.mktemp("runs")
    return raypfl.run(experiment(folder, method="fedavg-ft", rounds=2, evaluation__every=0)).run_dir


@pytest.fixture(scope="module")
def pefll_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    described = experiment(folder, method="pefll", rounds=2, evaluation__every=0)
    return raypfl.run(described.override(["method.length=5", "method.batch=8"])).run_dir


@pytest.fixture(scope="module")
def one(run_dir: Path) -> Service:
    return without_ray(run_dir)


@pytest.fixture(scope="module")
def pefll(pefll_dir: Path) -> Service:
    return without_ray(pefll_dir)


def without_ray(run_dir: Path) -> Service:
    """A service outside of Ray Serve, which makes no batches."""
    service = Service(str(run_dir), TOKEN, Limits(megabytes=0.05, samples=20))

    async def alone(asked: _Query) -> Any:
        return (await asyncio.to_thread(service._answer_all, [asked]))[0]

    service._answer_in_batch = alone  # type: ignore[method-assign]
    return service


@dataclass
class Seen:
    """A request as it came over the wire."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: bytes


@contextlib.contextmanager
def listening(service: Service) -> Iterator[tuple[str, list[Seen]]]:
    """While active, a service answers at an address without Ray; gives the address, and what it is asked."""
    seen: list[Seen] = []

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        asked = Request(scope, receive)
        headers = {name.lower(): value for name, value in asked.headers.items()}
        body = await asked.body()
        seen.append(Seen(asked.method, asked.url.path, asked.url.query, headers, body))
        await (await service(asked))(scope, receive, send)

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", seen
        finally:
            server.should_exit = True
            thread.join()


def body(**arrays: np.ndarray) -> bytes:
    return safetensors.numpy.save(arrays)


def request(
    path: str = "/personalize",
    content: bytes | Iterable[bytes] = b"",
    method: str = "POST",
    token: str = f"Bearer {TOKEN}",
    query: str = "",
    length: int | None = None,
    media: str = "",
) -> Request:
    parts = [content] if isinstance(content, bytes) else list(content)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    headers = [(b"authorization", token.encode())] * bool(token)
    headers += [(b"content-type", media.encode())] * bool(media)
    headers += [(b"content-length", str(length).encode())] * (length is not None)
    scope = {"type": "http", "method": method, "path": path, "query_string": query.encode(), "headers": headers}
    return Request(scope, receive)


def as_json(**values: Any) -> bytes:
    return json.dumps({name: np.asarray(value, object).tolist() for name, value in values.items()}).encode()


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
        ({"content": body(x=X)}, 400, "must have x and y, nothing else; it has: x"),
        ({"content": body(x=X, y=Y), "path": "/predict"}, 400, "must have x and y and inputs"),
        ({"content": body(x=X, y=Y, inputs=X[0]), "path": "/predict"}, 400, "inputs has the shape [1, 8, 8], but"),
        ({"content": body(x=X, y=Y, inputs=X[:0]), "path": "/predict"}, 400, "inputs is empty"),
        ({"content": body(x=X, y=Y), "media": JSON}, 400, "not JSON"),
        ({"content": b"[1]", "media": JSON}, 400, "JSON object"),
        ({"content": b"[" * 40_000, "media": JSON}, 400, "not JSON"),
        ({"content": b'{"x": [[1], [2, 3]], "y": [0, 1]}', "media": JSON}, 400, "no arrays of numbers"),
        ({"content": b'{"x": {"a": 1}, "y": [0, 1]}', "media": JSON}, 400, "x has the shape []"),
        ({"content": as_json(x=X, y=["3"] * 11 + ["ten"]), "media": JSON}, 400, "'ten', which is no class of the run"),
        ({"content": as_json(x=X, y=[10**30] * 12), "media": JSON}, 400, "y is object"),
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


@pytest.mark.parametrize(
    ("asked", "status", "sentence"),
    [
        (
            {"path": "/personalize", "content": body(x=X, y=Y)},
            404,
            "GET /embedding, POST /model and POST /predict, nothing",
        ),
        ({"path": "/embedding"}, 405, "takes GET"),
        ({"path": "/model", "content": body(x=X, y=Y)}, 400, "must have descriptor, nothing else; it has: x, y"),
        (
            {"path": "/model", "content": body(descriptor=np.ones(4))},
            400,
            "float64[4], but must be 5 numbers",
        ),
        ({"path": "/model", "content": body(descriptor=np.full(5, np.nan))}, 400, "not finite"),
        ({"path": "/model", "content": body(descriptor=np.full(5, 1e300))}, 400, "not finite from this descriptor"),
        ({"path": "/model", "content": body(descriptor=np.ones(5)), "query": "held_out=0.5"}, 400, "held_out is for"),
    ],
)
def test_a_service_of_pefll_takes_descriptors_and_no_samples(pefll: Service, asked: dict, status: int, sentence: str):
    code, said = refused(pefll, request(**asked))
    assert code == status and sentence in said, said


def test_only_the_descriptor_leaves_a_client_of_pefll_in_a_process_of_its_own(
    pefll: Service, pefll_dir: Path, tmp_path: Path
):
    np.savez(tmp_path / "samples.npz", x=X, y=Y)
    with listening(pefll) as (address, seen):
        words = [sys.executable, "-c", CLIENT, address, TOKEN, tmp_path / "samples.npz", tmp_path / "m.safetensors"]
        subprocess.run(words, check=True, timeout=300)

    assert [(asked.method, asked.path, asked.query) for asked in seen] == [
        ("GET", "/", ""), ("GET", "/embedding", ""), ("POST", "/model", ""),
    ]  # fmt: skip
    assert [asked.body for asked in seen[:2]] == [b"", b""]
    known = {"accept-encoding", "authorization", "connection", "content-length", "content-type", "host", "user-agent"}
    assert set().union(*(asked.headers for asked in seen)) <= known
    sent = json.loads(seen[2].body)
    assert list(sent) == ["descriptor"] and np.shape(sent["descriptor"]) == (5,)

    here = raypfl.trained_models(pefll_dir).personalize(X, Y, held_out=0)
    images = torch.from_numpy(X)
    there = raypfl.load_model(tmp_path / "m.safetensors")(images)
    torch.testing.assert_close(there, here.model(images))


def test_a_descriptor_is_the_mean_embedding_of_normalised_samples_with_their_classes(tmp_path: Path):
    datasets.cifar10(tmp_path, each=20)
    changes = ["method={name: pefll, embedding: cnn, length: 3, batch: null}", "model=lenet", "rounds=1"]
    changes += [f"data={{name: cifar10, root: {tmp_path}}}", "partition={name: iid, clients: 4}", "cohort.size=3"]
    models = raypfl.trained_models(raypfl.run(experiment(tmp_path).override(changes)).run_dir)
    file = tmp_path / "embedding.safetensors"
    file.write_bytes(embedder_file(models))
    x, y = models.outline.data.take(models.outline.data.indices(0))

    scaled = (x / 255 - models.outline.mean[:, None, None]) / models.outline.std[:, None, None]
    network = EmbeddingNetwork("cnn", (3, 32, 32), 10, 3).double()
    network.load_state_dict(models.task.networks["embed"].unflatten(models.server["embed"].double()))
    by_hand = network((torch.from_numpy(scaled).double(), torch.from_numpy(y))).mean(0)
    np.testing.assert_allclose(read_embedder(file).descriptor(x, y), by_hand.detach().numpy(), rtol=1e-4, atol=1e-6)


def test_predictions_are_those_of_the_model_that_the_client_would_get(one: Service, pefll: Service, tmp_path: Path):
    descriptor = [0.5, -1.0, 2.0, 0.0, 1.0]
    by_name = ["3" if label == 3 else "7" for label in Y]
    ways = [(one, "/personalize", {"x": X, "y": by_name}), (pefll, "/model", {"descriptor": descriptor})]
    for serving, path, made_from in ways:
        with listening(serving) as (address, _):
            session = requests.Session()
            session.headers["Authorization"] = f"Bearer {TOKEN}"
            sent = {"headers": {"Content-Type": JSON}, "timeout": 60}
            model = session.post(address + path, data=as_json(**made_from), **sent)
            answer = session.post(f"{address}/predict", data=as_json(**made_from, inputs=X), **sent)
        (tmp_path / "m.safetensors").write_bytes(model.content)
        outputs = raypfl.load_model(tmp_path / "m.safetensors")(torch.from_numpy(X))
        np.testing.assert_allclose(answer.json()["outputs"], outputs.detach().numpy(), rtol=1e-4, atol=1e-5)
        assert answer.json()["predictions"] == [str(number) for number in outputs.argmax(1).tolist()]


def test_a_busy_service_says_in_json_when_to_ask_again_and_the_client_does(
    pefll: Service, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(service, "RETRY", 0)
    pefll._busy = service.PLACES
    busy = asyncio.run(pefll(request("/model", as_json(descriptor=[0.0] * 5), media=JSON)))
    assert (busy.status_code, busy.media_type, busy.headers["Retry-After"]) == (503, "application/json", "0")
    assert "requests are waiting already" in json.loads(bytes(busy.body))["error"]

    def one_less(later: float) -> None:
        pefll._busy -= 1

    monkeypatch.setattr("raypfl.trained.serving.remote.time.sleep", one_less)
    with listening(pefll) as (address, seen):
        raypfl.RemoteRun(address, TOKEN).personalize(X, [str(label) for label in Y])
    assert [asked.path for asked in seen] == ["/", "/embedding", "/model", "/model"]
    pefll._busy = 0


def test_the_examples_of_the_page_work(
    one: Service, pefll: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    examples = [code for code in blocks("docs/new_clients.md", "python") if "http://127.0.0.1:8000" in code]
    for serving, example in zip((pefll, one), examples, strict=True):
        with listening(serving) as (address, _):
            code = example.replace("http://127.0.0.1:8000", address)
            exec(code, {"x": X, "y": Y, "token": TOKEN, "torch": torch})
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("['0', '1', '2'") and printed[-1].count("'") == 4


def test_what_takes_too_long_is_refused_in_json(one: Service, monkeypatch: pytest.MonkeyPatch):
    def slow(clients: list, held_out: float) -> list:
        time.sleep(0.3)
        raise ConfigError("Too late.")

    monkeypatch.setattr(service, "TIMEOUT", 0.02)
    monkeypatch.setattr(one._models, "personalize_all", slow)
    late = asyncio.run(one(request("/personalize", body(x=X, y=Y))))
    assert (late.status_code, late.media_type, late.headers["Retry-After"]) == (503, "application/json", "1")

    async def forever() -> dict[str, Any]:
        await asyncio.sleep(60)
        raise AssertionError

    asked = request("/personalize")
    asked._receive = forever
    assert refused(one, asked) == (408, "The body did not arrive within 0.02 seconds.")
    assert one._busy == 0


def test_a_client_sends_its_samples_only_if_it_is_told_to(one: Service, run_dir: Path):
    with listening(one) as (address, seen):
        remote = raypfl.RemoteRun(address, TOKEN)
        with pytest.raises(ConfigError, match=r"fedavg-ft trains on the client's samples.*upload=True"):
            remote.personalize(X, Y)
        assert [asked.path for asked in seen] == ["/"]
        model = remote.personalize(X, Y, upload=True)
        with pytest.raises(RaypflError, match=r"answers 401: The header Authorization"):
            raypfl.RemoteRun(address, "another").personalize(X, Y)
    here = raypfl.trained_models(run_dir).personalize(X, Y, held_out=0)
    torch.testing.assert_close(model(torch.from_numpy(X)), here.model(torch.from_numpy(X)))


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
    good = [_Query(((np.roll(X, i, 0), np.roll(Y, i)), 0.5), None) for i in range(3)]
    *made, bad = one._answer_all([*good, _Query(((X * 0, Y), 0.5), None)])
    assert calls == [4, 1, 1, 1, 1]
    assert str(bad) == "No model for this one."
    for answer in made:
        assert isinstance(answer, bytes)
        (tmp_path / "m.safetensors").write_bytes(answer)
        assert raypfl.load_model(tmp_path / "m.safetensors")(torch.from_numpy(X)).shape == (12, 10)
    calls.clear()
    one._answer_all([_Query((good[0].client[0], share), None) for share in (0.5, 0.25, 0.5, 0.25)])
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
    assert "Token: the value of $RAYPFL_TOKEN" in done.stdout and TOKEN not in done.output
    assert done.stdout.endswith("Press Ctrl-C to stop.\nStopping.\n") and done.stderr == "Stopped.\n"
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
    about = session.get(address, timeout=60).json()
    assert about["input_shape"] == [1, 8, 8] and about["class_names"] == [str(digit) for digit in range(10)]
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
