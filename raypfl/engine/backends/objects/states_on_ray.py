"""Clients' states in Ray's object store: what client actors compute on the nodes that hold them, or read from files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from raypfl.engine.backends.client_actor import get_states
from raypfl.federation.exchange.backend import StoredStack, read_stacks
from raypfl.storage.stacks import Fetch
from raypfl.storage.states import StateFile


def map_states(
    actors_by_node: Mapping[str, Sequence[Any]], function: Callable[[Fetch, Any], Any], jobs: Sequence[tuple[str, Any]]
) -> list[Any]:
    """Return ``function(fetch, job)`` of each job, which comes with the node that holds its stacks.

    A client actor of that node computes it. Without one, or if it dies, this process does.
    """
    actors_in_rotation = {node: cycle(actors) for node, actors in actors_by_node.items()}
    replies = []
    for node, job in jobs:
        actors = actors_in_rotation.get(node)
        replies.append(None if actors is None else next(actors).map_states.remote(function, job))

    results = []
    for reply, (_, job) in zip(replies, jobs, strict=True):
        if reply is not None:
            try:
                results.append(ray.get(reply))
                continue
            except RayTaskError as error:
                raise error.cause from error
            except RayError:
                pass
        results.append(function(get_states, job))
    return results


def read_states(
    actors_by_node: Mapping[str, Sequence[Any]], location: str, files: Sequence[StateFile], warn: Callable[[str], None]
) -> Iterator[StoredStack]:
    """Yield the stacks in files, which lie on the nodes of the actors that have read them; without actors, here.

    What an actor cannot read, this process does, with a warning.
    """
    # One actor of each node first, so that a few files are spread over the nodes.
    ranked = [(rank, node, actor) for node, actors in actors_by_node.items() for rank, actor in enumerate(actors)]
    readers = sorted(ranked, key=lambda entry: entry[0])[: len(files)]
    shares = [files[first :: len(readers)] for first in range(len(readers))]
    streams = []
    for (_, node, actor), share in zip(readers, shares, strict=True):
        streams.append((node, actor.read_states.remote(location, share)))

    for (node, stream), share in zip(streams, shares, strict=True):
        try:
            stacks = list(_received(node, stream))
        except RayError as error:
            # Raises Damaged if the file is the problem, not the node.
            stacks = list(_read_here(location, share))
            problem = str(error.cause) if isinstance(error, RayTaskError) else "its client actor died"
            warn(
                f"A node cannot read clients' states in {location}: {problem}. The server's process reads them, which "
                "takes longer."
            )
        yield from stacks
    if not actors_by_node:
        yield from _read_here(location, files)


def _received(node: str, stream: Any) -> Iterator[StoredStack]:
    """Yield what an actor's `read_states` yields: of each stack, its outline and then the stack itself."""
    for outline in stream:
        shard, contents = ray.get(outline)
        yield StoredStack(shard, next(stream), contents, node)
    ray.get(stream.completed())


def _read_here(location: str, files: Sequence[StateFile]) -> Iterator[StoredStack]:
    for stored in read_stacks(location, files):
        yield stored._replace(stack=ray.put(stored.stack))
