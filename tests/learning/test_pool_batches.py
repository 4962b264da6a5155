"""Mini-batches of pools, whose samples belong to no client: the same on the server and on every client."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from raypfl import Mean, Method
from raypfl.common import rng
from raypfl.common.errors import ConfigError, MethodError
from raypfl.data import IID, load_federated
from raypfl.engine.prepared import Prepared
from raypfl.learning.augmentation import Crop, Flip
from raypfl.learning.batches import Samples
from raypfl.learning.sample_order import epoch_order
from raypfl.learning.sample_pools import Pool
from tests.support import datasets
from tests.support.federation import MEAN, POOLED, STD, Federation, assert_close
from tests.support.runs import experiment


def pool_of(fed: Federation, round: int = 1) -> Pool:
    return fed.pools.pool("auxiliary", round)


def places(fed: Federation, batch) -> list[int]:
    """Which of the pool's samples a batch has."""
    pixels = batch.x * torch.from_numpy(STD).reshape(-1, 1, 1) + torch.from_numpy(MEAN).reshape(-1, 1, 1)
    pool = fed.inputs[-POOLED:].reshape(POOLED, -1)
    return [int((pool == row.round().numpy().reshape(-1)).all(1).argmax()) for row in pixels]


class Compares(Method):
    """Sends the server's batches down, and asks how far the clients' own are from them."""

    def start(self, task):
        return {"apart": torch.ones(1)}

    def round(self, server, cohort):
        batches = list(cohort.pool("auxiliary").batches(4, epochs=2, augment=True, stream="teachers"))
        sent = {f"x{i}": batch.x for i, batch in enumerate(batches)}
        server["apart"] = cohort.run(self.compare, **sent)["apart"]

    def compare(self, clients, **sent):
        batches = clients.pool("auxiliary").batches(4, epochs=2, augment=True, stream="teachers")
        apart = sum(float((batch.x - sent[f"x{i}"]).abs().sum()) for i, batch in enumerate(batches))
        return {"apart": Mean(torch.full((len(clients),), apart + abs(len(batches) - len(sent))))}


def test_a_batch_on_a_client_is_the_servers_of_the_same_round_and_stream():
    fed = Federation(method=Compares(), augmentation=[Crop(padding=1), Flip()], group_size=2)
    assert float(fed.run_rounds(None, None)["apart"]) == 0.0


def test_batches_differ_from_round_to_round_and_from_stream_to_stream_and_are_the_same_again():
    fed = Federation()
    batches = pool_of(fed).batches(POOLED)
    (first,) = batches
    (again,) = batches
    (other,) = pool_of(fed).batches(POOLED, stream="b")
    (next_round,) = pool_of(fed, 2).batches(POOLED)
    assert torch.equal(first.x, again.x)
    assert not torch.equal(first.x, other.x) and not torch.equal(first.x, next_round.x)


def test_epochs_are_shuffled_as_a_clients_are():
    fed = Federation()
    batches = pool_of(fed).batches(4, steps=5, stream="s")
    keys = np.array([rng.key(fed.seed, "pool batches/auxiliary/s", 1)], dtype=np.uint64)
    expected = epoch_order(keys, np.array([POOLED]), 4, steps=5)
    visits = [expected.index[0, s, : expected.counts[0, s]].tolist() for s in range(5)]
    assert [places(fed, batch) for batch in batches] == visits
    assert len(batches) == 5 and sorted([*visits[0], *visits[1], *visits[2]]) == list(range(POOLED))


def test_images_are_changed_by_the_experiments_augmentation_and_only_if_asked_to():
    fed = Federation(augmentation=[Flip(p=1.0)])
    (plain,), (flipped,) = (pool_of(fed).batches(POOLED, augment=augment) for augment in (False, True))
    assert torch.equal(flipped.x, plain.x.flip(-1))


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_a_teachers_row_goes_to_its_sample_however_often_that_is_visited(steps):
    fed = Federation()
    batches = pool_of(fed).batches(4, steps=steps)
    once = [place for batch in batches.once(2) for place in places(fed, batch)]
    assert once == sorted({place for batch in batches for place in places(fed, batch)})
    labelled = batches.with_targets(torch.tensor(once) * 10.0)
    assert [batch.y.tolist() for batch in labelled] == [[10.0 * p for p in places(fed, batch)] for batch in batches]


@pytest.mark.parametrize("steps", [1, 3, 7])
def test_a_teachers_row_goes_to_its_view_where_images_are_augmented(steps):
    fed = Federation(augmentation=[Crop(padding=1), Flip()])
    batches = pool_of(fed).batches(4, steps=steps, augment=True)
    seen = torch.cat([batch.x for batch in batches.once(3)]).flatten(1).sum(1)
    assert [batch.y.tolist() for batch in batches.with_targets(seen)] == [
        batch.x.flatten(1).sum(1).tolist() for batch in batches
    ]


def test_a_fraction_is_the_same_samples_in_all_rounds_and_a_part_of_every_larger_one():
    fed = Federation()

    def used(fraction: float, round: int) -> set[int]:
        return {p for batch in pool_of(fed, round).batches(2, fraction=fraction) for p in places(fed, batch)}

    assert used(0.5, 1) == used(0.5, 2) and len(used(0.5, 1)) == 4
    assert used(0.5, 1) < used(0.8, 1) < used(1.0, 1)


def test_no_more_than_a_batch_of_a_pool_is_in_memory_as_floats(monkeypatch):
    fed = Federation()
    sizes = []
    take = Samples.take
    monkeypatch.setattr(Samples, "take", lambda self, where: sizes.append(len(where)) or take(self, where))
    for _ in pool_of(fed).batches(2, epochs=3):
        pass
    assert max(sizes) == 2


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"size": 0}, "size of at least 1"),
        ({"size": 2, "fraction": 1.5}, "fraction above 0 and at most 1"),
        ({"size": 2, "epochs": 1, "steps": 2}, "epochs or steps, not both"),
        ({"size": 2, "fraction": 0.01}, "0.01 of the pool 'auxiliary' is less than one of its 9 samples"),
    ],
)
def test_batches_that_cannot_be_are_refused(options, sentence):
    with pytest.raises(MethodError, match=sentence):
        pool_of(Federation()).batches(**options)


def test_targets_for_other_samples_and_pools_that_are_not_there_are_refused():
    fed = Federation()
    with pytest.raises(MethodError, match="Targets have 9 rows, but 4 samples are visited"):
        pool_of(fed).batches(4, steps=1).with_targets(torch.zeros(9, 3))
    with pytest.raises(ConfigError, match="no pool called 'auxilary'; did you mean 'auxiliary'"):
        fed.clients().pool("auxilary")


@pytest.mark.parametrize("normalise", ["clients", "own"])
def test_a_pool_from_elsewhere_is_normalised_as_the_clients_data_or_by_its_own_mean(tmp_path, normalise):
    root = str(tmp_path / "cifar")
    datasets.cifar10(Path(root))
    datasets.cifar100(Path(root))
    pool = {"name": "cifar100", "root": root, "normalise": normalise}
    config = {"name": "cifar10", "root": root, "pools": {"auxiliary": pool}}
    described = experiment(tmp_path, cohort__size=2).replace(data=config, partition=IID(clients=2))
    data = load_federated(described.data, described.partition, seed=0)
    pools = Prepared(described, data).server_pools
    (batch,) = pools.pool("auxiliary", 1).batches(len(data.pool("auxiliary")))

    assert_close(batch.x.std((0, 2, 3), correction=0), torch.ones(3), 1e-4 if normalise == "own" else 1.0)
    assert bool((batch.x.mean((0, 2, 3)).abs() < 1e-4).all()) == (normalise == "own")
