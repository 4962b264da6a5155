"""The backend of one process, without Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from raypfl.clients.worker import Call, Group, Worker
from raypfl.common.errors import Stopped
from raypfl.common.stopping import StopRequest
from raypfl.common.threads import threads
from raypfl.federation.exchange.backend import Done, Failed, StoredStack, failure, read_stacks, states_of
from raypfl.storage.stacks import Fetch, Stack
from raypfl.storage.states import StateFile


class Inline:
    """Groups run one after the other in this process: for a breakpoint, or a machine with torch alone.

    `threads` : the number of torch's threads while a group is at work; None: as many as otherwise.
    """

    def __init__(self, worker: Worker, stop: StopRequest | None = None, threads: int | None = None):
        self._worker = worker
        self._stop = stop or StopRequest()
        self._threads = threads

    @property
    def num_actors(self) -> int:
        return 1

    def broadcast(self, arrays: Mapping[str, np.ndarray], inside: bool = True) -> Any:
        return {name: np.array(array) for name, array in arrays.items()}

    def get_broadcast(self, handle: Any) -> Mapping[str, np.ndarray]:
        return handle

    def run(self, call: Call, groups: Sequence[Group]) -> Iterator[tuple[Group, Done | Failed]]:
        for group in groups:
            if self._stop.received:
                raise Stopped("The run was asked to stop.")

            try:
                with self._stop.interruptible(), threads(self._threads or torch.get_num_threads()):
                    states = states_of(group.states, _as_they_are)
                    reply, stack = self._worker.work(call, list, group, states)
            except Exception as error:
                yield group, failure(error)
            else:
                stacks = [] if reply.new_states is None else [(group.clients, stack, reply.new_states)]
                yield group, Done(reply, stacks)

    def map_states(self, function: Callable[[Fetch, Any], Any], jobs: Sequence[tuple[str, Any]]) -> list[Any]:
        return [function(_as_they_are, job) for _, job in jobs]

    def read_states(self, location: str, files: Sequence[StateFile]) -> Iterator[StoredStack]:
        return read_stacks(location, files)


def _as_they_are(stacks: Sequence[Stack]) -> Sequence[Stack]:
    return stacks
