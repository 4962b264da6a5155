"""Checkpoints in S3, which has no folders and cannot rename; here its server is a thread of this process."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Callable, Iterator

import pyarrow.fs as pafs
import pytest
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

from raypfl.common.errors import CheckpointError
from raypfl.storage import filesystems
from raypfl.storage.checkpoints.layout import checkpoint_names
from raypfl.storage.lease import hold_lease
from tests.storage.test_checkpoint import assert_same, load, make_snapshot, save

RUN = "runs/digits"


class Store:
    """A server of S3 that remembers the requests."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        answer = DomainDispatcherApplication(create_backend_app)

        def recorded(environ: dict, start_response: Callable) -> object:
            self.requests.append(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}")
            return answer(environ, start_response)

        self.server = make_server("127.0.0.1", 0, recorded, threaded=True)
        self.host = f"127.0.0.1:{self.server.server_port}"

    def make_bucket(self, name: str) -> None:
        urllib.request.urlopen(urllib.request.Request(f"http://{self.host}/{name}", method="PUT"))

    def location(self, bucket: str) -> str:
        return f"s3://{bucket}/{RUN}?endpoint_override={self.host}&scheme=http&region=us-east-1"


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    store = Store()
    thread = threading.Thread(target=store.server.serve_forever)
    thread.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "any")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "any")
        yield store
    store.server.shutdown()
    thread.join()


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
    store.requests.clear()
    save(location, 1, keep=2)

    # Neither folders, nor uploads in parts, which are three requests.
    uploads = [request for request in store.requests if request.startswith(("PUT", "POST"))]
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
