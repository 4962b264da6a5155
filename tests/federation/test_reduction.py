"""What groups send is added up along one tree: in any order of replies, in any bundles, with or without failures."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from raypfl.clients.replies.reduction import reduced
from raypfl.clients.worker import Group
from raypfl.common.errors import MethodError
from raypfl.common.messages import Each, Mean, Sum
from raypfl.engine.backends.inline import Inline
from raypfl.federation.cohort import round_record
from raypfl.federation.exchange.aggregation import ReplyAggregator, take_sums
from raypfl.federation.exchange.backend import Done
from raypfl.federation.exchange.bundles import bundled
from raypfl.federation.exchange.tree_sum import Subtree, Total, TreeSum
from raypfl.federation.settings import FailureSettings
from raypfl.learning.privacy import PrivacySettings
from tests.federation.test_cohort import Probe, ids_of, rows_of
from tests.support.federation import Federation

CLIENTS = 13


class Bundling(Inline):
    """Runs bundles for a number of actors in a random order, as a backend with actors may."""

    actors = 1
    draws = np.random.default_rng(0)
    sizes: tuple[int, ...] = ()

    def run(self, call, groups):
        bundles = bundled(groups, self.actors)
        self.sizes = self.sizes or tuple(len(bundle.groups) for bundle in bundles)
        for number in self.draws.permutation(len(bundles)):
            bundle = bundles[number]
            outcomes = list(super().run(call, bundle.groups))
            if len(outcomes) > 1:
                outcomes = with_sums_apart(outcomes)
            yield from outcomes


def with_sums_apart(outcomes):
    tree = TreeSum()
    finished = [(group, outcome) for group, outcome in outcomes if isinstance(outcome, Done)]
    for group, done in finished:
        tree.add(take_sums(group, done.reply))

    subtrees = tree.subtrees()
    for _, done in finished:
        object.__setattr__(done, "subtrees", subtrees)
        subtrees = []
    return outcomes


def numbers_of(clients) -> torch.Tensor:
    """Numbers of very different size, so that every other order of addition rounds differently."""
    return rows_of(clients, 300).float() * 10 ** (ids_of(clients)[:, None] % 7 - 3).float()


def answer(clients):
    rows = numbers_of(clients)
    clients.log(first=rows[:, 0])
    clients.state["rows"] = rows
    reply = {"sum": Sum(rows), "mean": Mean(rows, weight=clients.num_samples), "number": Mean(rows[:, 1])}
    if 5 in clients.ids or 2 in clients.ids:
        reply["some"] = Sum(rows[:, :2])
    return {**reply, "rows": Each(rows)}


def run(backend: type[Inline], function=answer, **options):
    fed = Federation(sizes=range(3, 3 + CLIENTS), method=Probe(answer=function), group_size=1, **options)
    fed.runner.backend = backend(fed.runner.backend._worker)
    cohort = fed.cohort()
    reply = cohort.run(fed.method.reply)
    fed.states.commit()
    states = torch.stack([torch.from_numpy(fed.state_of(client).get("rows", np.zeros(300))) for client in cohort.ids])
    values = {**reply, "states": states}
    return values, dict(round_record(cohort)[1].values), fed.ledger.entries, cohort.failed, fed.runner.backend


def for_actors(actors: int) -> type[Bundling]:
    return type("Bundling", (Bundling,), {"actors": actors})


def failing(clients):
    if 6 in clients.ids:
        raise ZeroDivisionError
    return answer(clients)


@pytest.mark.parametrize("function", [answer, failing])
def test_sums_have_the_same_bits_in_any_order_of_replies_and_in_any_bundles(function):
    skip = FailureSettings(on_client_failure="skip", retries=1)
    values, logged, entries, failed, _ = run(Inline, function, failures=skip)
    seen = set()
    for actors in (1, 1, 1, 2, 2, 100):
        again = run(for_actors(actors), function, failures=skip)
        assert all(torch.equal(tensor, again[0][name]) for name, tensor in values.items())
        assert list(again[0]) == list(values) and again[1:4] == (logged, entries, failed)
        seen.add(again[4].sizes)

    assert len(failed) == (function is failing) and {max(sizes) for sizes in seen} == {1, 2, 4}


def pairwise(rows: np.ndarray) -> np.ndarray:
    """The sum of rows, each half of a power of two first."""
    if len(rows) == 1:
        return rows[0]
    half = 2 ** math.ceil(math.log2(len(rows)) - 1)
    return pairwise(rows[:half]) + pairwise(rows[half:])


def test_a_sum_is_that_of_the_halves_and_no_other():
    values, *_ = run(Bundling)
    # Groups are in the order of their costs, and the last client has most samples.
    rows = values["rows"].numpy()[::-1]
    assert np.array_equal(values["sum"].numpy(), pairwise(rows))
    assert not np.array_equal(values["sum"].numpy(), sum(rows[1:], rows[0]))
    np.testing.assert_allclose(values["sum"], rows.astype(np.float64).sum(0), rtol=1e-3, atol=1e-3)


def test_masked_sums_are_the_same_in_bundles():
    def masked(clients):
        return {"sum": Sum(numbers_of(clients)), "mean": Mean(numbers_of(clients), weight=clients.num_samples)}

    plain, secure, bundles = (
        run(backend, masked, privacy=PrivacySettings(secure_aggregation=is_secure))[0]
        for backend, is_secure in ((Inline, False), (Inline, True), (Bundling, True))
    )
    assert all(torch.equal(secure[name], bundles[name]) for name in secure)
    np.testing.assert_allclose(secure["sum"], plain["sum"], atol=1e-4)


@pytest.mark.parametrize("in_flight", [1, 8, 30])
def test_the_server_keeps_a_sum_for_each_level_and_each_group_in_flight(in_flight):
    draws = np.random.default_rng(in_flight)
    coming = list(range(1000))
    tree = TreeSum()
    most = 0
    while coming:
        index = coming.pop(int(draws.integers(min(in_flight, len(coming)))))
        tree.add(Subtree(0, index, {"count": Total(np.ones(1), 1.0)}))
        most = max(most, len(tree))

    levels = math.ceil(math.log2(1000))
    assert most <= levels + 2 * (in_flight - 1)
    total = tree.totals()["count"]
    assert total.array.tolist() == [1000.0] and total.weight == 1000.0
    with pytest.raises(ValueError, match="was added before"):
        tree.add(*tree.subtrees())


def test_what_came_from_elsewhere_is_never_changed():
    arrays = [np.full(3, 2.0**k) for k in range(5)]
    tree = TreeSum()
    for index, array in enumerate(arrays):
        array.flags.writeable = False
        tree.add(Subtree(0, index, {"x": Total(array, 0.0)}))
    given = tree.subtrees()
    outer = TreeSum()
    for subtree in given:
        outer.add(subtree)
    assert outer.totals()["x"].array.tolist() == [31.0] * 3
    assert [subtree.totals["x"].array[0] for subtree in given] == [15.0, 16.0]


def test_sums_of_different_shapes_are_refused_by_name():
    def uneven(clients):
        return {"x": Sum(torch.ones(len(clients), 1 + (3 in clients.ids)))}

    with pytest.raises(MethodError, match=r"'x' has the shape \[1\] for some groups of clients and \[2\] for others"):
        run(Inline, uneven)


def test_rows_that_only_some_clients_send_are_refused_and_not_zero_for_the_others():
    def some(clients):
        return {"x": Each(torch.ones(len(clients)))} if 3 in clients.ids else {}

    with pytest.raises(MethodError, match=r"returned 'x' as rows for \d of 13 clients"):
        run(Inline, some)


def test_a_name_that_is_a_sum_for_some_clients_and_a_mean_for_others_is_refused():
    def mixed(clients):
        total = Sum if 3 in clients.ids else Mean
        return {"x": total(torch.ones(len(clients)))}

    with pytest.raises(MethodError, match="has 'x' as Mean and as Sum; return it as the same for every client"):
        run(Inline, mixed)


def rows_by_group(*parts: torch.Tensor) -> torch.Tensor:
    """The rows that the server gets if groups send these for two clients each, in this order."""
    replies = ReplyAggregator(2 * len(parts), torch.device("cpu"))
    for index, rows in enumerate(parts):
        positions = np.array([2 * index, 2 * index + 1])
        group = Group(index, tuple(positions.tolist()), positions, {}, [(), ()])
        replies.add(group, {"x": reduced("Probe.train", "x", Each(rows), 2)})
    return replies.result("Probe.train")["x"]


def test_rows_of_different_shapes_are_refused_and_not_repeated():
    with pytest.raises(MethodError, match=r"'x' has the shape \[3\] for some groups of clients and \[1\] for others"):
        rows_by_group(torch.zeros(2, 3), torch.zeros(2, 1))


def test_rows_of_different_types_keep_their_numbers_in_any_order_of_replies():
    whole = torch.tensor([1, 2])
    halves = torch.tensor([0.5, 1.5])
    assert rows_by_group(whole, halves).tolist() == [1, 2, 0.5, 1.5]
    assert rows_by_group(halves, whole).tolist() == [0.5, 1.5, 1, 2]


def test_bundles_shrink_to_single_groups_and_are_whole_subtrees():
    groups = [Group(i, (i, i + 1), np.arange(2), {}, [(), ()], length=float(200 - i % 7)) for i in range(200)]
    for actors in (1, 3, 16, 200):
        bundles = bundled(groups, actors)
        sizes = [len(bundle.groups) for bundle in bundles]
        assert [group for bundle in bundles for group in bundle.groups] == groups
        assert all(
            bundle.index % size == 0 and math.log2(size).is_integer()
            for bundle, size in zip(bundles, sizes, strict=True)
        )
        assert sizes == sorted(sizes, reverse=True) and sizes[-1] == 1
        assert sizes[0] <= max(1, len(groups) / (2 * actors)) and len(sizes) <= max(16 * actors, 112)

    assert max(len(bundle.groups) for bundle in bundled(groups, 1, most_clients=16)) == 8
    with_gap = [group for group in groups if group.index != 5]
    assert 4 not in {bundle.index for bundle in bundled(with_gap, 1) if len(bundle.groups) > 1}
