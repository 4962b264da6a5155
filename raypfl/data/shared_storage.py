"""Data sets in shared storage: each machine copies them once, and reads its copy."""

from __future__ import annotations

import hashlib
import shutil
import uuid
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.fs as pafs

from raypfl.common.errors import ConfigError, DataError
from raypfl.data.arrow_file import cache_lock, explain_write_errors
from raypfl.data.datasets.settings import DataConfig
from raypfl.data.datasets.source import DataSource

S = TypeVar("S", bound=DataSource)


def copy_to_this_machine(data: DataConfig, cache: Path) -> DataConfig:
    """Copy the files of a data set at an address such as ``s3://bucket/folder``; return a description of the copy.

    A copy is made again when the name, the size or the modification time of any file differs.

    Raises
    ------
    ConfigError : if there is no folder at an address.
    DataError : if it cannot be read, or the copy cannot be written.
    """
    pools = {name: _copy_source(pool, cache) for name, pool in data.sources().items()}
    return replace(_copy_source(data, cache), pools=data.pools | pools)


def _copy_source(source: S, cache: Path) -> S:
    """Copy the files of one data set, unless they are on this machine already."""
    if source.root is None or "://" not in source.root:
        return source

    if source.download:
        raise ConfigError(
            f"data.root is {source.root!r}, and data.download is true; a download needs a folder of this machine. "
            "Download into one, and copy it to the address."
        )
    try:
        file_system, root = pafs.FileSystem.from_uri(source.root)
        infos = file_system.get_file_info(pafs.FileSelector(root, recursive=True))
        folder = cache / "copies" / _copy_key(source.root, infos)

        with explain_write_errors(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
        with cache_lock(folder):
            if not folder.exists():
                _copy_files(file_system, root, folder)
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"data.root is {source.root!r}, which cannot be read: {error}.") from error
    return replace(source, root=str(folder))


def _copy_files(file_system: pafs.FileSystem, root: str, folder: Path) -> None:
    """Copy all files below `root`; `folder` exists only once they are complete."""
    unfinished = folder.with_name(f".{uuid.uuid4().hex}")
    try:
        unfinished.mkdir()
        pafs.copy_files(root, str(unfinished), file_system, pafs.LocalFileSystem())
        unfinished.rename(folder)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"The data set at {root} cannot be copied to {folder}: {error}.") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _copy_key(address: str, infos: list[pafs.FileInfo]) -> str:
    """Return a key of the address, and of the names, sizes and modification times of its files."""
    states = sorted((file.path, file.size, file.mtime_ns) for file in infos if file.type == pafs.FileType.File)
    return hashlib.sha256(f"{address} {states}".encode()).hexdigest()[:16]
