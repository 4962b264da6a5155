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
import safetensors.torch
import torch
import uvicorn
from starlette.requests import Request

import raypfl
from raypfl.common.errors import ConfigError, DataError, RaypflError
from raypfl.models.architectures.hypernetworks import EmbeddingNetwork
from raypfl.trained.serving import service
from raypfl.trained.serving.embedder import embedder_file, read_embedder
from raypfl.trained.serving.service import RequestLimits, Service, _Query
from tests.support import datasets
from tests.support.command import raypfl as raypfl_command
from tests.support.pages import blocks
from tests.support.ports import free_port
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
    """The run of a method that trains on a new client's samples."""
    folder = tmp_path_factory.mktemp("runs")
    return raypfl.run(experiment(folder, method="fedavg-ft", rounds=2, evaluation__every=0)).run_dir


@pytest.fixture(scope="module")
def pefll_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    described = experiment(folder, method="pefll", rounds=2, evaluation__every=0)
    return raypfl.run(described.override(["method.length=5", "method.batch=8"])).run_dir


@pytest.fixture(scope="module")
def training_service(run_dir: Path) -> Service:
    return without_ray(run_dir)


@pytest.fixture(scope="module")
def pefll(pefll_dir: Path) -> Service:
    return without_ray(pefll_dir)


def without_ray(run_dir: Path) -> Service:
    """A service outside of Ray Serve, which answers each query alone."""
    service = Service(str(run_dir), TOKEN, RequestLimits(megabytes=0.05, samples=20))

    async def answer_alone(query: _Query) -> Any:
        answers = await asyncio.to_thread(service._answer_all, [query])
        return answers[0]

    service._answer_in_batch = answer_alone  # type: ignore[method-assign]
    return service


@dataclass
class ReceivedRequest:
    """A request as it came over the wire."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: bytes


@contextlib.contextmanager
def listening(service: Service) -> Iterator[tuple[str, list[ReceivedRequest]]]:
    """A context in which a service answers without Ray: its address, and the requests as they arrive."""
    requests_received: list[ReceivedRequest] = []

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        headers = {name.lower(): value for name, value in request.headers.items()}
        body = await request.body()
        requests_received.append(ReceivedRequest(request.method, request.url.path, request.url.query, headers, body))
        answer = await service(request)
        await answer(scope, receive, send)

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", requests_received
        finally:
            server.should_exit = True
            thread.join()


def body(**arrays: np.ndarray) -> bytes:
    return safetensors.numpy.save(arrays)


IN_BFLOAT16 = safetensors.torch.save({"x": torch.from_numpy(X).bfloat16(), "y": torch.from_numpy(Y)})


def request(
    path: str = "/personalize",
    content: bytes | Iterable[bytes] = b"",
    method: str = "POST",
    token: str = f"Bearer {TOKEN}",
    query: str = "",
    length: int | None = None,
    media: str = "",
) -> Request:
    """A request whose body arrives in these parts, as the service receives it."""
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


def post_samples(address: str, params: dict[str, Any], content: bytes) -> requests.Response:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    return requests.post(f"{address}/personalize", params=params, data=content, headers=headers, timeout=120)


def refusal(service: Service, request: Request) -> tuple[int, str]:
    """The status and the error of a request that is refused."""
    answer = asyncio.run(service(request))
    return answer.status_code, json.loads(bytes(answer.body))["error"]


@pytest.mark.parametrize(
    ("options", "status", "sentence"),
    [
        ({"token": ""}, 401, "Bearer"),
        ({"token": "Bearer guess"}, 401, "Bearer"),
        ({"token": f"Basic {TOKEN}"}, 401, "Bearer"),
        ({"token": "Bearer \xe4"}, 401, "Bearer"),
        ({"path": "/other"}, 404, "POST /personalize"),
        ({"method": "PUT"}, 405, "takes POST, not PUT"),
        ({"query": "held_out=1"}, 400, "held_out is"),
        ({"query": "held_out=nan"}, 400, "held_out is"),
        ({"query": "heldout=0.5"}, 400, 'has "heldout"; it may have held_out, once, and nothing else'),
        ({"query": "held_out=0.5&held_out=0.1"}, 400, 'has "held_out" and "held_out"; it may have'),
        ({"content": b"", "length": 10**9}, 413, "larger than 0.05 MB"),
        ({"content": [b"x" * 20_000] * 5}, 413, "larger than 0.05 MB"),
        ({"content": b""}, 400, "not safetensors"),
        ({"content": b"\xff" * 1000}, 400, "not safetensors"),
        ({"content": b"\x80\x04\x95"}, 400, "not safetensors"),
        ({"content": IN_BFLOAT16}, 400, "an array of the type 'BF16', which NumPy lacks; send float32"),
        ({"content": body(x=X)}, 400, "must have x and y, nothing else; it has: x"),
        ({"content": body(x=X, y=Y), "path": "/predict"}, 400, "must have x and y and inputs"),
        ({"content": body(x=X, y=Y, inputs=X[0]), "path": "/predict"}, 400, "inputs has the shape [1, 8, 8], but"),
        ({"content": body(x=X, y=Y, inputs=X[:0]), "path": "/predict"}, 400, "inputs is empty"),
        ({"content": body(x=X, y=Y), "media": JSON}, 400, "not JSON"),
        ({"content": b"[1]", "media": JSON}, 400, "JSON object"),
        ({"content": b"[" * 40_000, "media": JSON}, 400, "not JSON"),
        ({"content": b'{"x": [[1], [2, 3]], "y": [0, 1]}', "media": JSON}, 400, "not arrays of numbers"),
        ({"content": b'{"x": {"a": 1}, "y": [0, 1]}', "media": JSON}, 400, "x has the shape []"),
        ({"content": as_json(x=X, y=["3"] * 11 + ["ten"]), "media": JSON}, 400, "'ten', which is not in class_names"),
        ({"content": as_json(x=X, y=[10**30] * 12), "media": JSON}, 400, "is not in class_names"),
        ({"content": body(x=np.repeat(X, 2, 0), y=np.repeat(Y, 2))}, 413, "more than 20 samples"),
        ({"content": body(x=np.zeros((), np.uint8), y=np.zeros(1, np.uint8))}, 400, "x has the shape"),
        ({"content": body(x=X, y=Y + 5)}, 400, "there are 10 classes"),
        ({"content": body(x=np.full_like(X, np.inf, np.float32), y=Y)}, 400, "not finite"),
    ],
)
def test_a_bad_request_gets_a_status_and_a_sentence(
    training_service: Service, options: dict, status: int, sentence: str
):
    code, error = refusal(training_service, request(**options))
    assert code == status and sentence in error, error


def test_a_body_that_is_too_large_is_not_read_to_its_end(training_service: Service):
    def endless() -> Iterable[bytes]:
        for _ in range(5):
            yield b"x" * 20_000
        pytest.fail("more was read")

    parts = iter(endless())

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": next(parts), "more_body": True}

    too_large = request(content=b"")
    too_large._receive = receive
    status, _ = refusal(training_service, too_large)
    assert status == 413


@pytest.mark.parametrize(
    ("options", "status", "sentence"),
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
def test_a_service_of_pefll_takes_descriptors_and_no_samples(pefll: Service, options: dict, status: int, sentence: str):
    code, error = refusal(pefll, request(**options))
    assert code == status and sentence in error, error


@pytest.mark.thorough
def test_only_the_descriptor_leaves_a_client_of_pefll_in_a_process_of_its_own(
    pefll: Service, pefll_dir: Path, tmp_path: Path
):
    np.savez(tmp_path / "samples.npz", x=X, y=Y)
    with listening(pefll) as (address, received):
        words = [sys.executable, "-c", CLIENT, address, TOKEN, tmp_path / "samples.npz", tmp_path / "m.safetensors"]
        subprocess.run(words, check=True, timeout=300)

    # No path, query, header or body holds more than the protocol needs.
    assert [(request.method, request.path, request.query) for request in received] == [
        ("GET", "/", ""), ("GET", "/embedding", ""), ("POST", "/model", ""),
    ]  # fmt: skip
    plain = {"accept-encoding", "authorization", "connection", "content-length", "content-type", "host", "user-agent"}
    assert set().union(*(request.headers for request in received)) <= plain
    assert [request.body for request in received[:2]] == [b"", b""]
    body_sent = json.loads(received[2].body)
    assert list(body_sent) == ["descriptor"] and np.shape(body_sent["descriptor"]) == (5,)

    local = raypfl.trained_models(pefll_dir).personalize(X, Y, held_out=0)
    images = torch.from_numpy(X)
    remote_outputs = raypfl.load_model(tmp_path / "m.safetensors")(images)
    torch.testing.assert_close(remote_outputs, local.model(images))


@pytest.mark.thorough
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


def test_predictions_are_those_of_the_model_that_the_client_would_get(
    training_service: Service, pefll: Service, tmp_path: Path
):
    samples = {"x": X, "y": [str(label) for label in Y]}
    descriptor = {"descriptor": [0.5, -1.0, 2.0, 0.0, 1.0]}
    options = {"headers": {"Content-Type": JSON, "Authorization": f"Bearer {TOKEN}"}, "timeout": 60}

    for service_used, path, content in ((training_service, "/personalize", samples), (pefll, "/model", descriptor)):
        with listening(service_used) as (address, _):
            model = requests.post(address + path, data=as_json(**content), **options)
            answer = requests.post(f"{address}/predict", data=as_json(**content, inputs=X), **options)

        (tmp_path / "m.safetensors").write_bytes(model.content)
        outputs = raypfl.load_model(tmp_path / "m.safetensors")(torch.from_numpy(X))
        np.testing.assert_allclose(answer.json()["outputs"], outputs.detach().numpy(), rtol=1e-4, atol=1e-5)
        assert answer.json()["predictions"] == [str(number) for number in outputs.argmax(1).tolist()]


def test_a_busy_service_answers_in_json_when_to_retry_and_the_client_does(
    pefll: Service, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(service, "RETRY", 0)
    pefll._busy = service.PLACES
    busy = asyncio.run(pefll(request("/model", as_json(descriptor=[0.0] * 5), media=JSON)))
    assert (busy.status_code, busy.media_type, busy.headers["Retry-After"]) == (503, "application/json", "0")
    assert "requests are waiting already" in json.loads(bytes(busy.body))["error"]

    def finish_a_request(seconds: float) -> None:
        pefll._busy -= 1

    monkeypatch.setattr("raypfl.trained.serving.remote.time.sleep", finish_a_request)
    with listening(pefll) as (address, received):
        raypfl.RemoteRun(address, TOKEN).personalize(X, [str(label) for label in Y])
    assert [request.path for request in received] == ["/", "/embedding", "/model", "/model"]
    pefll._busy = 0


def test_the_examples_of_the_page_work(
    training_service: Service,
    pefll: Service,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    examples = [code for code in blocks("docs/new_clients.md", "python") if "http://127.0.0.1:8000" in code]
    for service_used, example in zip((pefll, training_service), examples, strict=True):
        with listening(service_used) as (address, _):
            code = example.replace("http://127.0.0.1:8000", address)
            exec(code, {"x": X, "y": Y, "token": TOKEN, "torch": torch})

    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("['0', '1', '2'") and printed[-1].count("'") == 4


def test_slow_answers_and_slow_bodies_are_refused_in_json(training_service: Service, monkeypatch: pytest.MonkeyPatch):
    def slow(clients: list, held_out: float) -> list:
        time.sleep(0.3)
        raise ConfigError("Too late.")

    monkeypatch.setattr(service, "TIMEOUT", 0.02)
    monkeypatch.setattr(training_service._models, "personalize_all", slow)
    answer = asyncio.run(training_service(request("/personalize", body(x=X, y=Y))))
    assert (answer.status_code, answer.media_type, answer.headers["Retry-After"]) == (503, "application/json", "1")

    async def receive_nothing() -> dict[str, Any]:
        await asyncio.sleep(60)
        raise AssertionError

    without_body = request("/personalize")
    without_body._receive = receive_nothing
    assert refusal(training_service, without_body) == (408, "The body did not arrive within 0.02 seconds.")
    assert training_service._busy == 0


def test_a_client_sends_its_samples_only_on_request(training_service: Service, run_dir: Path):
    with listening(training_service) as (address, received):
        remote = raypfl.RemoteRun(address, TOKEN)
        with pytest.raises(ConfigError, match=r"fedavg-ft trains on the client's samples.*upload=True"):
            remote.personalize(X, Y)
        assert [request.path for request in received] == ["/"]

        model = remote.personalize(X, Y, upload=True)
        with pytest.raises(RaypflError, match=r"answers 401: The header Authorization"):
            raypfl.RemoteRun(address, "another").personalize(X, Y)
        # The token may come from a file that ends in a line break.
        assert raypfl.RemoteRun(address, f"{TOKEN}\n").about["method"] == "fedavg-ft"

    local = raypfl.trained_models(run_dir).personalize(X, Y, held_out=0)
    torch.testing.assert_close(model(torch.from_numpy(X)), local.model(torch.from_numpy(X)))


def test_a_client_takes_all_samples_that_can_be_sent_and_refuses_others_in_a_sentence(training_service: Service):
    images = torch.from_numpy(X).float()
    with listening(training_service) as (address, _):
        remote = raypfl.RemoteRun(address, TOKEN)
        expected = remote.personalize(X, Y, upload=True)(images)
        for x in (images.bfloat16(), images.clone().requires_grad_(), X.tolist()):
            torch.testing.assert_close(remote.personalize(x, Y, upload=True)(images), expected)

        for x, y, sentence in (
            ([[1], [1, 2]], Y, "The x are of different shapes"),
            (X.astype(str), Y, "x is <U3 and y is int64; these cannot be sent"),
            (X.astype(complex), Y, "x is complex128 and y is int64; these cannot be sent"),
            (X, None, "x is uint8 and y is object; these cannot be sent"),
        ):
            with pytest.raises(DataError, match=sentence):
                remote.personalize(x, y, upload=True)


@pytest.mark.parametrize(
    ("address", "token", "reason"),
    [
        ("", TOKEN, "unknown url type"),
        ("http://127.0.0.1:1", "two\nlines", "Invalid header value"),
        ("http://127.0.0.1:1", "10 €", "codec can't encode"),
    ],
)
def test_an_address_or_a_token_that_no_request_can_have_is_refused_in_a_sentence(address: str, token: str, reason: str):
    with pytest.raises(RaypflError, match=f"cannot be part of a request: .*{reason}.*\\. An address is like"):
        raypfl.RemoteRun(address, token).about  # noqa: B018


@pytest.mark.parametrize("answer", [b"HTTP/1.0 200 OK\r\n\r\n<html>", b"HTTP/1.0 200 OK\r\n\r\n{}", b"SSH-2.0\r\n"])
def test_an_address_at_which_something_else_answers_is_refused_in_a_sentence(answer: bytes):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer_once() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(answer)

        thread = threading.Thread(target=answer_once)
        thread.start()
        with pytest.raises(RaypflError, match=r"answers, but is not a run|cannot be asked for a model"):
            raypfl.RemoteRun(f"http://127.0.0.1:{server.getsockname()[1]}", TOKEN).personalize(X, Y)
        thread.join()


def test_requests_that_come_together_are_answered_together_and_a_failing_one_fails_alone(
    training_service: Service, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    sizes_of_calls = []
    personalize_all = training_service._models.personalize_all

    def failing_for_black_images(clients: list, held_out: float) -> list:
        sizes_of_calls.append(len(clients))
        if any((x == 0).all() for x, _ in clients):
            raise ConfigError("No model for this one.")
        return personalize_all(clients, held_out)

    monkeypatch.setattr(training_service._models, "personalize_all", failing_for_black_images)
    good = [_Query(((np.roll(X, i, 0), np.roll(Y, i)), 0.5), None) for i in range(3)]
    bad = _Query(((X * 0, Y), 0.5), None)

    *answers, error = training_service._answer_all([*good, bad])
    assert sizes_of_calls == [4, 1, 1, 1, 1]
    assert str(error) == "No model for this one."
    for answer in answers:
        assert isinstance(answer, bytes)
        (tmp_path / "m.safetensors").write_bytes(answer)
        assert raypfl.load_model(tmp_path / "m.safetensors")(torch.from_numpy(X)).shape == (12, 10)

    # Queries with different shares of held-out samples cannot share a call.
    sizes_of_calls.clear()
    training_service._answer_all([_Query((good[0].client[0], share), None) for share in (0.5, 0.25, 0.5, 0.25)])
    assert sizes_of_calls == [2, 2]


@pytest.mark.slow
def test_real_clients_get_their_models_from_ray_serve_until_ctrl_c(
    run_dir: Path, ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    port = free_port()
    over = threading.Event()

    def visit_then_press_ctrl_c() -> list[requests.Response]:
        try:
            return visit(f"http://127.0.0.1:{port}", over)
        finally:
            if not over.is_set():
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setenv("RAYPFL_TOKEN", TOKEN)
    with ThreadPoolExecutor(1) as pool:
        visitors = pool.submit(visit_then_press_ctrl_c)
        try:
            served = raypfl_command("serve", str(run_dir), "--port", str(port))
        finally:
            over.set()
        answers = visitors.result(timeout=60)

    assert served.exit_code == 130, served.output
    assert "Token: the value of $RAYPFL_TOKEN" in served.stdout and TOKEN not in served.output
    assert served.stdout.endswith("Press Ctrl-C to stop.\nStopping.\n") and served.stderr == "Stopped.\n"
    with pytest.raises(requests.ConnectionError):
        requests.get(f"http://127.0.0.1:{port}", timeout=10)

    assert [answer.status_code for answer in answers] == [200] * 16, answers[0].text
    (tmp_path / "m.safetensors").write_bytes(answers[0].content)
    local = raypfl.trained_models(run_dir).personalize(X, Y, held_out=0.5)
    images = torch.from_numpy(X)
    torch.testing.assert_close(raypfl.load_model(tmp_path / "m.safetensors")(images), local.model(images))


def visit(address: str, over: threading.Event) -> list[requests.Response]:
    """The answers to sixteen clients, eight at a time, once a service answers at the address."""
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
        futures = [pool.submit(post_samples, address, {"held_out": 0.5}, body(x=X, y=Y)) for _ in range(16)]

    too_large = session.post(f"{address}/personalize", data=b"x" * 10_000_001, timeout=60)
    assert (too_large.status_code, too_large.json()["error"]) == (413, "The body is larger than 10 MB.")
    with pytest.raises(ConfigError, match="cannot be listened on"):
        service._refuse_taken("127.0.0.1", int(address.rpartition(":")[2]))
    return [future.result() for future in futures]


def test_a_method_without_models_for_new_clients_is_refused_before_anything_starts(tmp_path: Path):
    run = raypfl.run(experiment(tmp_path, method="fedavg", rounds=1, evaluation__every=0)).run_dir
    with (
        pytest.raises(ConfigError, match="fedavg has no way"),
        service.served(run, TOKEN, "127.0.0.1", 8765, replicas=1, limits=RequestLimits()),
    ):
        pass
