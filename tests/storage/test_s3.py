"""Checkpoints in S3, which has no folders and cannot rename; its server is a process of its own."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pyarrow.fs as pafs
import pytest
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

from raypfl.common.errors import CheckpointError
from raypfl.storage import filesystems
from raypfl.storage.checkpoints.layout import checkpoint_names
from raypfl.storage.lease import hold_lease
from tests.storage.test_checkpoint import assert_same, load, make_snapshot, save
from tests.support.processes import FORKED

RUN = "runs/digits"


def serve(address: Connection, log: Path) -> None:
    """Serve S3 in this process; its port is sent to `address`, and each request is a line of `log`."""
    answer = DomainDispatcherApplication(create_backend_app)

    def recorded(environ: dict, start_response: Callable) -> object:
        with log.open("a") as file:
            file.write(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}\n")
        return answer(environ, start_response)

    server = make_server("127.0.0.1", 0, recorded, threaded=True)
    address.send(server.server_port)
    server.serve_forever()


class Store:
    """A server of S3, and the requests that it has had."""

    def __init__(self, port: int, log: Path) -> None:
        self.host = f"127.0.0.1:{port}"
        self.log = log

    def make_bucket(self, name: str) -> None:
        request = urllib.request.Request(f"http://{self.host}/{name}", method="PUT")
        urllib.request.urlopen(request, timeout=60)

    def location(self, bucket: str) -> str:
        return f"s3://{bucket}/{RUN}?endpoint_override={self.host}&scheme=http&region=us-east-1"

    def requests(self) -> list[str]:
        return self.log.read_text().splitlines()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    log = tmp_path_factory.mktemp("s3") / "requests"
    address, of_server = FORKED.Pipe(duplex=False)
    server = FORKED.Process(target=serve, args=(of_server, log), daemon=True)
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "any")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "any")
        yield Store(address.recv(), log)
    server.kill()
    server.join()


def names_in(location: str) -> list[str]:
    """Return the names of the checkpoints in a location."""
    files, root = filesystems.open_location(location)
    return sorted(checkpoint_names(files, root))


def test_checkpoints_come_back_from_a_bucket_and_older_ones_are_deleted(store: Store) -> None:
    store.make_bucket("keeps")
    location = store.location("keeps")
    address, _, query = location.partition("?")
    for round in (1, 2, 3):
        assert save(location, round, keep=2) == f"{address}/{round:06d}-round-{round}?{query}"

    loaded = load(location)
    assert loaded is not None
    assert_same(loaded.server, make_snapshot(location).server)
    assert names_in(location) == ["000002-round-2", "000003-round-3"]


def test_a_file_is_one_request(store: Store) -> None:
    store.make_bucket("counts")
    location = store.location("counts")
    before = len(store.requests())
    save(location, 1, keep=2)

    # Neither folders, nor uploads in parts, which are three requests.
    uploads = [request for request in store.requests()[before:] if request.startswith(("PUT", "POST"))]
    files, root = filesystems.open_location(location)
    everything = files.get_file_info(pafs.FileSelector(root, recursive=True))
    written = [f"PUT /{entry.path}" for entry in everything if entry.type == pafs.FileType.File]
    assert sorted(uploads) == sorted(written)


def test_a_checkpoint_without_manifest_was_never_finished(store: Store) -> None:
    store.make_bucket("breaks")
    location = store.location("breaks")
    save(location, 1, keep=1)
    files, root = filesystems.open_location(location)
    pafs.copy_files(f"{root}/000001-round-1", f"{root}/000002-round-2", files, files)
    files.delete_file(f"{root}/000002-round-2/manifest.json")
    warnings: list[str] = []
    loaded = load(location, warnings)

    assert loaded is not None
    assert loaded.round == 1
    assert "is unfinished" in warnings[0]

    save(location, 3, keep=2)
    assert names_in(location) == ["000001-round-1", "000003-round-3"]


def test_a_bucket_that_is_not_there_is_said_before_the_run(store: Store) -> None:
    location = store.location("nowhere")
    with (
        pytest.raises(CheckpointError, match=r"cannot be written to s3://nowhere.*Set checkpoint.location"),
        hold_lease(location, "an attempt", lambda text: None),
    ):
        pass
