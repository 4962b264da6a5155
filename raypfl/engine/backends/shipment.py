"""A run's job on its way from the driver to the actors, and its data on the way to their nodes.

The actors' processes begin by importing this module, so it imports nothing slow.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from raypfl.engine.backends.node_affinity import on_node

if TYPE_CHECKING:
    from raypfl.data import ClientData
    from raypfl.engine.job import Job
    from raypfl.experiment import Experiment

CHUNK = 32 << 20
"""Bytes of a file that travel in one object."""


@dataclass(frozen=True)
class Shipment:
    """A job, or an experiment to try, and its data, whose pickle has a reference to prepared files.

    Attributes
    ----------
    node : the id of the driver's node, where the files are.
    content : the pickled job and data.
    """

    node: str
    content: bytes

    @classmethod
    def pack(cls, job: Job | Experiment, data: ClientData) -> Shipment:
        """Pack a job on the driver."""
        return cls(ray.get_runtime_context().get_node_id(), ray.cloudpickle.dumps((job, data)))

    def unpack(self) -> tuple[Any, ClientData]:
        """Return the job and its data. If this node does not have the files, one of its processes fetches them.

        Raises
        ------
        DataError : if the files cannot be fetched or written.
        """
        from raypfl.data.arrow_file import cache_lock, explain_write_errors, receive_arrays
        from raypfl.data.store import PreparedDataMissing

        try:
            return ray.cloudpickle.loads(self.content)
        except PreparedDataMissing as missing:
            (_, first), *_ = missing.files
            with explain_write_errors(first):
                first.parent.mkdir(parents=True, exist_ok=True)

            with cache_lock(first):
                # Another process of this node may have fetched the files while this one waited for the lock.
                try:
                    return ray.cloudpickle.loads(self.content)
                except PreparedDataMissing:
                    for path_on_driver, path in missing.files:
                        receive_arrays(path, self._chunks(path_on_driver))
        return ray.cloudpickle.loads(self.content)

    def _chunks(self, path: Path) -> Iterator[bytes]:
        """Read a file of the driver's node."""
        read: Any = ray.remote(_read).options(
            num_cpus=0,
            num_returns="streaming",
            # So that memory holds two chunks, not the file.
            _generator_backpressure_num_objects=2,
            **on_node(ray, self.node),
        )
        for chunk in read.remote(path):
            yield ray.get(chunk)


def _read(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            yield chunk
