"""Which sums are added up on nodes: decided without actors."""

from __future__ import annotations

import numpy as np
import pytest

from raypfl.clients.worker import Group
from raypfl.federation.exchange.bundles import bundled
from raypfl.federation.exchange.partial_sums import (
    FAN_IN,
    MIN_BYTES,
    PartialSum,
    PartialSums,
    should_stay_on_nodes,
)
from raypfl.federation.exchange.tree_sum import Subtree, Total, TreeSum


def groups(count: int) -> list[Group]:
    return [Group(index, (index,), np.arange(1), {}, [()]) for index in range(count)]


def tree_of(parts: list[PartialSum]) -> TreeSum:
    tree = TreeSum()
    for part in parts:
        for subtree in part.subtrees:
            tree.add(subtree)
    return tree


def leaves_of(bundle_groups: tuple[Group, ...], values: np.ndarray) -> PartialSum:
    leaves = [Subtree(0, group.index, {"theta": Total(values[group.index], 1.0)}) for group in bundle_groups]
    return PartialSum(bundle_groups, tree_of([PartialSum(bundle_groups, leaves)]).subtrees())


@pytest.mark.parametrize(("count", "actors"), [(1, 1), (8, 9), (9, 9), (100, 3), (65, 99), (1000, 20), (777, 999)])
def test_blocks_that_come_in_any_order_leave_few_sums_to_the_server_and_change_no_bit(count, actors):
    draws = np.random.default_rng(count)
    values = draws.normal(size=count).astype(np.float32) * np.float32(10) ** draws.integers(-5, 5, count)
    all_groups = groups(count)
    partials = PartialSums(all_groups)

    # Those whose blocks are added up come in again, at a random time.
    coming = [leaves_of(bundle.groups, values) for bundle in bundled(all_groups, actors)]
    num_added = 0
    while coming:
        parts = partials.add(coming.pop(int(draws.integers(len(coming)))))
        if parts:
            num_added += 1
            together = tuple(group for part in parts for group in part.groups)
            coming.append(PartialSum(together, tree_of(parts).subtrees()))

    left = partials.pop_all()
    assert sorted(group.index for part in left for group in part.groups) == list(range(count))
    assert len(left) <= FAN_IN and num_added <= count / (FAN_IN - 1) + 3
    alone = tree_of([leaves_of((group,), values) for group in all_groups])
    assert tree_of(left).totals()["theta"].array == alone.totals()["theta"].array
    assert partials.pop_all() == []


def test_groups_that_fail_leave_their_blocks_to_the_server_and_no_others():
    partials = PartialSums(groups(3 * FAN_IN))
    failing = groups(3 * FAN_IN)[FAN_IN]
    for group in groups(3 * FAN_IN):
        if group.index != failing.index:
            parts = partials.add(PartialSum((group,), []))
            if parts:
                together = tuple(group for part in parts for group in part.groups)
                assert partials.add(PartialSum(together, [])) == []
    assert sorted(len(part.groups) for part in partials.pop_all()) == [1] * (FAN_IN - 1) + [FAN_IN] * 2


def test_nodes_add_up_what_would_keep_the_server_busy_and_nothing_else():
    resnet = 45_000_000
    assert should_stay_on_nodes(3333, resnet, 10.0)
    assert not should_stay_on_nodes(3333, resnet, 1000.0)  # the server has time
    assert not should_stay_on_nodes(FAN_IN, resnet, 0.1)  # few replies
    assert not should_stay_on_nodes(3333, MIN_BYTES - 1, 0.1)  # small ones
    assert not should_stay_on_nodes(3333, resnet, 0.0)  # nothing is known yet
