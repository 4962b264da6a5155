"""Where a run keeps what outlives it: a local folder, or an object store that Arrow knows."""

from __future__ import annotations

import functools
import os

import pyarrow as pa
import pyarrow.fs as pafs

from raypfl.common.errors import CheckpointError, Refused

OBJECT_STORES = {"s3", "gcs", "abfs"}
"""Arrow's names of file systems without folders, where a path is only a name."""


class UnusableLocation(CheckpointError, Refused):
    """Error for a location of checkpoints that cannot be opened, or not be written to before a run begins."""


def open_location(location: str) -> tuple[pafs.FileSystem, str]:
    """Return the file system of a location, and the path in it.

    Parameters
    ----------
    location : a local path or any ``pyarrow.fs`` URI.

    Raises
    ------
    UnusableLocation : if the URI is none that Arrow can open.
    """
    if not is_shared(location):
        return pafs.LocalFileSystem(), absolute(location)
    try:
        return _open_shared(location)
    except (pa.ArrowException, OSError) as error:
        raise UnusableLocation(
            f"checkpoint.location is {location!r}, which cannot be opened: {error}. "
            f"Give a folder, or a URI such as s3://bucket/folder or gs://bucket/folder."
        ) from error


# Cached, since opening S3 sends a request for the bucket's region.
@functools.lru_cache(maxsize=16)
def _open_shared(location: str) -> tuple[pafs.FileSystem, str]:
    if location.startswith("s3://") and "allow_delayed_open" not in location:
        # A small file is then sent in one request, not in the three of an upload in parts.
        location += ("&" if "?" in location else "?") + "allow_delayed_open=true"
    files, path = pafs.FileSystem.from_uri(location)
    return files, path.rstrip("/")


def is_shared(location: str) -> bool:
    """Return whether all nodes of a cluster reach a location: they do if it is a URI, but a path may be a local one."""
    return "://" in location


def absolute(location: str) -> str:
    """Return a location independent of the working folder."""
    return location if is_shared(location) else os.path.abspath(os.path.expanduser(location))


def join(location: str, name: str) -> str:
    """Append a name to a location, before its query if it has one: ``s3://bucket/runs/1?scheme=http``."""
    address, mark, query = location.partition("?") if is_shared(location) else (location, "", "")
    return f"{address.rstrip('/')}/{name}{mark}{query}"


def read_bytes(files: pafs.FileSystem, path: str) -> bytes:
    """Return the content of a file."""
    with files.open_input_stream(path, compression=None) as stream:
        return stream.read()


def write_bytes(files: pafs.FileSystem, path: str, content: bytes | pa.Buffer) -> None:
    """Write a file into an existing folder; in an object store, others see all of it or nothing."""
    with files.open_output_stream(path, compression=None) as stream:
        stream.write(content)


def make_folder(files: pafs.FileSystem, path: str) -> None:
    """Make a folder, and those above it, unless they exist; an object store needs none."""
    if files.type_name not in OBJECT_STORES:
        files.create_dir(path, recursive=True)
