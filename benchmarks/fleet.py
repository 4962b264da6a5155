"""What the head of a fleet does for an exchange: simulated actors, and the server's own code.

    python -m benchmarks.fleet                       # 1,000 actors on 125 nodes, 10,000 clients: seconds
    python -m benchmarks.fleet --actors 10000 --nodes 1250 --clients 100000
    python -m benchmarks.fleet --ray                 # what Ray takes for each message, with one actor

Clients cost one to nine steps. The code that runs on Ray (`federation.exchange`) cuts, bundles and hands them out. A
group takes a twentieth of a second for each step, with a disturbance of 5 %, and replies with 1,626,442 numbers.
Printed are the milliseconds that the head's process takes, the most sums that wait for a neighbour in the tree, and
what is left to the head if nodes add sums up.

With `--ray`: the milliseconds of pushing a task, and of a look at many references of which none is ready.
"""

from __future__ import annotations

import argparse
import heapq
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from raypfl.clients.worker import Group
from raypfl.federation.exchange.bundles import Bundle, bundled
from raypfl.federation.exchange.grouping import cut_into_groups, group_sizes
from raypfl.federation.exchange.partial_sums import PartialSum, PartialSums
from raypfl.federation.exchange.placement import Dispatch
from raypfl.federation.exchange.tree_sum import Subtree, Total, TreeSum
from raypfl.storage.stacks import StackRef

STEP = 0.05
NUMBERS = 1_626_442
RESNET_BYTES = 45_000_000
NETWORK = 25e9 / 8
HERE = "benchmarks.fleet"


@dataclass(frozen=True)
class Fleet:
    """Simulated actors and the clients of a cohort."""

    actors: int
    nodes: int
    clients: int

    def groups(self, draws: np.random.Generator, with_states: bool) -> list[Group]:
        """A cohort's groups; with states, each client's is on a node at random."""
        steps = draws.integers(1, 10, self.clients).astype(float)
        homes = draws.integers(0, self.nodes, self.clients)
        groups = []
        for index, members in enumerate(cut_into_groups(steps, group_sizes(self.clients, "sequential"), "sequential")):
            states = [(StackRef(None, 0, str(homes[member])),) if with_states else () for member in members]
            length = float(steps[members].sum())
            groups.append(Group(index, tuple(members.tolist()), members, {}, states, length, STEP * length))
        return groups


def replay(
    fleet: Fleet, bundles: Sequence[Bundle], slowness: Sequence[float], draws: np.random.Generator
) -> list[tuple[Bundle, str]]:
    """Hand out bundles and take replies until all are done; print what that took.

    Returns the bundles in the order in which they finish, each with the node of its actor.
    """
    begin = time.perf_counter()
    dispatch = Dispatch(bundles)
    # As on Ray, those of one node join together.
    node_of = sorted(str(actor % fleet.nodes) for actor in range(fleet.actors))
    for actor, node in enumerate(node_of):
        dispatch.join(actor, node, slowness[actor])
    joined = time.perf_counter() - begin

    free = [0.0] * fleet.actors
    ends: list[tuple[float, int, int, Bundle]] = []
    now = 0.0

    def hand_out() -> float:
        begin = time.perf_counter()
        pushed = []
        while chosen := dispatch.next(now):
            pushed.append(chosen)
        seconds = time.perf_counter() - begin

        for actor, bundle in pushed:
            duration = slowness[actor] * bundle.seconds * float(draws.lognormal(0, 0.05))
            free[actor] = max(free[actor], now) + duration
            heapq.heappush(ends, (free[actor], actor, bundle.index, bundle))
        return seconds

    first = joined + hand_out()
    later = 0.0
    order = []
    while not dispatch.done:
        begin = time.perf_counter()
        moment = now + dispatch.pause(now)
        later += time.perf_counter() - begin
        if moment < ends[0][0]:
            now = max(moment, now + 1e-6)
            later += hand_out()
            continue

        now, actor, _, bundle = heapq.heappop(ends)
        order.append((bundle, node_of[actor]))
        begin = time.perf_counter()
        dispatch.finished(actor, bundle, now)
        later += time.perf_counter() - begin + hand_out()
    print(
        f"first {min(fleet.actors, len(bundles))} pushes {1000 * first:.0f} ms, a reply {1000 * later / len(order):.3f}"
    )
    return order


def add_up(order: Sequence[tuple[Bundle, str]]) -> None:
    """Add up bundles' sums in the order in which they arrive; print what that takes."""
    arrays = [np.full(NUMBERS, 1.0 + k, np.float32) for k in range(8)]
    tree = TreeSum()
    most = 0
    begin = time.perf_counter()
    for turn, (bundle, _) in enumerate(order):
        level = len(bundle.groups).bit_length() - 1
        tree.add(Subtree(level, bundle.index >> level, {"theta": Total(arrays[turn % 8], 1.0)}))
        most = max(most, len(tree))
    tree.totals()
    seconds = time.perf_counter() - begin
    print(f"adding up a reply of {4 * NUMBERS:,} bytes {1000 * seconds / len(order):.2f} ms; {most} sums kept at most")


def add_up_on_nodes(groups: Sequence[Group], order: Sequence[tuple[Bundle, str]]) -> None:
    """Print what nodes add up, each block where its last part has come from, and what is left to the head."""
    partials = PartialSums(groups)
    # The reference of each partial sum is replaced by the node that keeps it.
    coming = deque(PartialSum(bundle.groups, node) for bundle, node in order)
    blocks = 0
    received: Counter[str] = Counter()
    seconds = 0.0
    while coming:
        partial = coming.popleft()
        begin = time.perf_counter()
        parts = partials.add(partial)
        seconds += time.perf_counter() - begin
        if parts:
            blocks += 1
            node = partial.subtrees
            received[node] += sum(part.subtrees != node for part in parts)
            coming.appendleft(PartialSum(tuple(group for part in parts for group in part.groups), node))

    num_at_head = len(partials.pop_all())
    travel = RESNET_BYTES / NETWORK
    print(
        f"on nodes: {blocks} blocks added up, for which {sum(received.values())} sums travel, at most "
        f"{max(received.values(), default=0)} to a node; deciding takes {1000 * seconds / len(order):.4f} ms a reply\n"
        f"the head gets {num_at_head} sums, not {len(order)}: with ResNet-18, by arithmetic, "
        f"{num_at_head * travel:.1f} s of its network, not {len(order) * travel:.0f}, and at most "
        f"{max(received.values(), default=0) * travel:.1f} s of a node's"
    )


def messages() -> None:
    """Print what Ray takes for a push and for a look at references."""
    import ray

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    actor = ray.remote(num_cpus=0)(_Sleeper).remote()
    for count in (100, 1000, 2000):
        begin = time.perf_counter()
        references = [actor.sleep.remote(1000.0) for _ in range(count)]
        push = (time.perf_counter() - begin) / count

        begin = time.perf_counter()
        for _ in range(20):
            ray.wait(references, num_returns=64, timeout=0)
        look = (time.perf_counter() - begin) / 20
        print(f"{count} references: a push {1000 * push:.3f} ms, a look at all {1000 * look:.2f} ms")
    ray.kill(actor)


class _Sleeper:
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def main() -> None:
    """Replay an exchange of clients without states, with states, and on unequal actors."""
    parser = argparse.ArgumentParser(prog=f"python -m {HERE}", description=__doc__.partition("\n")[0])
    parser.add_argument("--actors", type=int, default=1000)
    parser.add_argument("--nodes", type=int, default=125)
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--ray", action="store_true", help="time Ray's messages instead")
    options = parser.parse_args()
    if options.ray:
        messages()
        return

    fleet = Fleet(options.actors, options.nodes, options.clients)
    equal = [1.0] * fleet.actors
    unequal = [float(1 + actor % fleet.nodes % 3) for actor in range(fleet.actors)]
    for name, with_states, slowness in (
        ("no states", False, equal),
        ("states on nodes at random", True, equal),
        ("actors one to three times as slow", False, unequal),
    ):
        draws = np.random.default_rng(0)
        begin = time.perf_counter()
        groups = fleet.groups(draws, with_states)
        cut = time.perf_counter() - begin
        begin = time.perf_counter()
        bundles = bundled(groups, fleet.actors)
        bundling = time.perf_counter() - begin
        print(f"\n{name}: {len(groups)} groups in {len(bundles)} bundles")
        print(f"cutting {1000 * cut:.0f} ms, bundling {1000 * bundling:.0f}")
        order = replay(fleet, bundles, slowness, draws)
        add_up_on_nodes(groups, order)
    add_up(order)


if __name__ == "__main__":
    main()
