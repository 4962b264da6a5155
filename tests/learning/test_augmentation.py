"""Augmentations change training images only, by the right windows and squares, the same in every run."""

from __future__ import annotations

from itertools import combinations
from types import ModuleType

import numpy as np
import pytest
import torch

import raypfl
from raypfl.common import rng
from raypfl.common.errors import ConfigError, RaypflError
from raypfl.common.messages import unmarked
from raypfl.data.datasets import DataConfig
from raypfl.learning.augmentation import Crop, Cutout, Flip, augmented
from raypfl.learning.batches import Samples
from raypfl.learning.sample_order import epoch_order
from tests.support.federated_images import Brighter, ChangesShape
from tests.support.federation import (
    Federation,
    assert_close,
    bare_loop,
    both_executors,
    both_networks,
    starts_of,
)
from tests.support.runs import ON_RAY, experiment

SEVERAL = (Crop(padding=1, p=0.8), Flip(), Cutout(size=2, p=0.5))


@pytest.fixture(scope="module")
def torchvision() -> ModuleType:
    """Its import takes four seconds, which processes that have none of these tests do without."""
    from torchvision.transforms.v2 import functional

    return functional


# What is done to an image


def photographs(count: int = 12, height: int = 9, width: int = 7) -> tuple[torch.Tensor, Samples]:
    """Bytes ``[n, 3, H, W]``, and what normalises them."""
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (count, 3, height, width), dtype=np.uint8))
    gain = torch.tensor([0.02, 0.03, 0.01])
    offset = torch.tensor([-2.0, -1.7, -1.9])
    return pixels, Samples(pixels, torch.zeros(count), gain.reshape(-1, 1, 1), offset.reshape(-1, 1, 1))


@pytest.mark.parametrize("fill", ["black", "mean"])
def test_a_crop_is_torchvisions_before_or_after_normalisation(torchvision, fill):
    pixels, source = photographs()
    corners = np.random.default_rng(1).integers(0, 7, (12, 2))
    u = torch.from_numpy(np.column_stack([np.zeros(12), (corners + 0.5) / 7]))
    cropped = Crop(padding=3, fill=fill)(source.normalise(pixels), u, source.offset)

    for crop, image, (top, left) in zip(cropped, pixels, corners.tolist(), strict=True):
        if fill == "black":
            expected = source.normalise(torchvision.crop(torchvision.pad(image, 3), top, left, 9, 7))
        else:
            expected = torchvision.crop(torchvision.pad(source.normalise(image), 3), top, left, 9, 7)
        assert torch.equal(crop, expected)


def test_a_flip_is_torchvisions_on_the_chosen_images(torchvision):
    pixels, source = photographs(4)
    x = source.normalise(pixels)
    flipped = Flip(p=0.3)(x, torch.tensor([[0.29], [0.3], [0.0], [0.99]], dtype=torch.float64), source.offset)
    assert torch.equal(flipped[[0, 2]], torchvision.horizontal_flip(x[[0, 2]]))
    assert torch.equal(flipped[[1, 3]], x[[1, 3]])


@pytest.mark.parametrize(("size", "above", "below"), [(4, 2, 2), (3, 1, 2), (1, 0, 1), (40, 20, 20)])
@pytest.mark.parametrize("fill", ["black", "mean"])
def test_a_cutout_is_a_square_around_a_pixel_cut_off_at_the_border(size, above, below, fill):
    pixels, source = photographs(9 * 7)
    x = source.normalise(pixels)
    centres = np.stack(np.divmod(np.arange(9 * 7), 7), axis=1)
    u = torch.from_numpy(np.column_stack([np.zeros(9 * 7), (centres + 0.5) / (9, 7)]))
    cut = Cutout(size=size, fill=fill)(x, u, source.offset)

    for cut_image, image, (row, column) in zip(cut, x, centres.tolist(), strict=True):
        expected = image.clone()
        square = np.s_[:, max(0, row - above) : row + below, max(0, column - above) : column + below]
        expected[square] = source.offset if fill == "black" else 0.0
        assert torch.equal(cut_image, expected)


@pytest.mark.parametrize("kind", [Crop, Flip, Cutout])
def test_a_chance_of_zero_changes_nothing_and_inputs_are_never_modified(kind):
    pixels, source = photographs()
    x = source.normalise(pixels)
    before = x.clone()
    u = torch.from_numpy(np.random.default_rng(2).random((12, kind.draws)))
    assert torch.equal(kind(p=0.0)(x, u, source.offset), x)
    assert not torch.equal(kind(p=1.0)(x, u, source.offset), x)
    assert torch.equal(x, before)


def test_augmentations_apply_in_order_each_with_its_own_draws():
    pixels, source = photographs()
    x = source.normalise(pixels)
    u = torch.from_numpy(np.random.default_rng(3).random((12, 4)))
    black = source.offset
    expected = Flip()(Crop()(x, u[:, :3], black), u[:, 3:], black)
    assert torch.equal(augmented(x, (Crop(), Flip()), u, black), expected)
    in_a_group = augmented(x.reshape(3, 4, *x.shape[1:]), (Crop(), Flip()), u.reshape(3, 4, 4), black)
    assert torch.equal(in_a_group.flatten(0, 1), expected)


# What is drawn


def random_draws(clients: int = 40, steps: int = 30, size: int = 25, each: int = 4, round: int = 0) -> np.ndarray:
    keys = rng.keys(5, "augmentation", round, range(clients))
    visits = epoch_order(np.zeros(clients, dtype=np.uint64), np.full(clients, 60), size, steps=steps).with_draws(
        keys, each
    )
    assert visits.draws is not None and visits.draws.shape == (clients, steps, size, each)
    return visits.draws


def test_all_windows_are_equally_likely_and_half_of_the_images_are_flipped():
    u = torch.from_numpy(random_draws()).flatten(0, 2)
    count = len(u)
    positions = torch.arange(81.0).reshape(1, 1, 9, 9).repeat(count, 1, 1, 1)
    zero = torch.zeros(1, 1, 1)
    # With a border as wide as the image, less one, the centre of the window tells which one it is.
    centre = Crop(padding=4, fill="mean")(positions, u[:, :3], zero)[:, 0, 4, 4].long()
    times = torch.bincount(centre, minlength=81).double()

    assert len(times) == 81
    assert (
        (times - count / 81).square() / (count / 81)
    ).sum() < 135  # chi-squared with 80 degrees of freedom: 1 in 10,000

    flipped = Flip()(positions, u[:, 3:], zero)[:, 0, 0, 0] != 0
    assert abs(flipped.double().mean() - 0.5) < 4 * 0.5 / count**0.5
    together = torch.corrcoef(torch.stack([centre.double(), flipped.double()]))[0, 1]
    assert abs(together) < 4 / count**0.5


def test_draws_differ_between_clients_steps_places_and_rounds():
    u = random_draws()
    count = u.size
    for b in (np.roll(u, 1, 0), np.roll(u, 1, 1), np.roll(u, 1, 2), np.roll(u, 1, 3), random_draws(round=1)):
        assert abs(np.corrcoef(u.ravel(), b.ravel())[0, 1]) < 4 / count**0.5


def test_draws_are_the_same_in_every_group_and_whatever_the_number_of_steps_and_places():
    u = random_draws()
    keys = rng.keys(5, "augmentation", 0, [7, 3])
    visits = epoch_order(np.zeros(2, dtype=np.uint64), np.array([10, 10]), 5, steps=2).with_draws(keys, 4)
    assert np.array_equal(visits.draws, u[[7, 3], :2, :5])
    assert np.array_equal(visits.with_draws(keys, 6).draws[..., :4], visits.draws)


# What is trained on


@both_executors
@both_networks
def test_training_is_the_bare_loops_on_the_same_changed_images(factory, executor):
    fed = Federation(factory, executor=executor, augmentation=SEVERAL)
    starts = starts_of(fed)
    clients = fed.clients()
    trained = clients.sgd(clients.loss, raypfl.per_client(starts))
    models, losses = bare_loop(fed, starts)

    assert_close(trained, models)
    assert_close(clients.losses, losses)
    unchanged = bare_loop(Federation(factory), starts)[0]
    assert (models - unchanged).abs().max() > 1e-3


@both_executors
def test_mini_batches_one_by_one_are_those_of_sgd_with_their_changes(executor):
    fed = Federation(executor=executor, augmentation=SEVERAL)
    clients = fed.clients()
    theta = raypfl.per_client(starts_of(fed))
    trained = clients.sgd(clients.loss, theta)
    for batch in clients.minibatches():
        theta = batch.step(clients.loss, theta)
    assert_close(theta, unmarked(trained))


def test_rounds_and_streams_change_the_same_samples_in_other_ways():
    # With one sample a client, the order of samples makes no difference.
    fed = Federation(sizes=(1,) * 5, augmentation=(Brighter(),))
    trained = []
    for round, stream in ((0, ""), (0, "other"), (1, "")):
        clients = fed.clients(round=round)
        trained.append(unmarked(clients.sgd(clients.loss, clients.initial, stream=stream)))
    for a, b in combinations(trained, 2):
        assert (a != b).any(dim=1).all()


@both_executors
def test_whatever_is_no_step_of_training_sees_images_and_labels_as_they_are(executor):
    def looked_at(fed: Federation) -> list[torch.Tensor]:
        clients = fed.clients()
        theta = clients.initial
        means, counts = clients.class_means(lambda p, x: x.flatten(1), theta)
        batches = clients.batches(3, "describe")
        parts = [
            *clients.evaluate(theta, "train").values(),
            clients.grad(clients.loss, theta),
            clients.map(lambda p, batch: batch.mean(batch.x), theta),
            *(tensor for batch in batches for tensor in batch),
        ]

        return [unmarked(part) for part in (means, counts, *parts)]

    changed, unchanged = (looked_at(Federation(executor=executor, augmentation=a)) for a in (SEVERAL, ()))
    assert all(torch.equal(one, b) for one, b in zip(changed, unchanged, strict=True))


def test_an_augmentation_that_changes_the_shape_of_images_is_told_so():
    clients = Federation(augmentation=(ChangesShape(),)).clients()
    with pytest.raises(RaypflError, match=r"tests.support.federated_images:ChangesShape.*not change their shape"):
        clients.sgd(clients.loss, clients.initial)


# Runs


AUGMENTED = "[{name: crop, padding: 1}, flip]"


def test_a_run_on_changed_images_learns_otherwise_and_is_judged_alike(tmp_path):
    plain_run, changed = (
        raypfl.run(experiment(tmp_path, method="fedavg", rounds=1, data__augmentation=a, engine__executor="sequential"))
        for a in ("[]", AUGMENTED)
    )
    assert plain_run.weights_hash != changed.weights_hash
    columns = ["client", "protocol", "samples"]
    assert plain_run.evaluations.select(columns).equals(changed.evaluations.select(columns))


@pytest.mark.thorough
def test_actors_see_the_same_images_as_one_process(tmp_path, ray_cluster):
    augmentations = "[crop, {name: 'tests.support.federated_images:Brighter', by: 0.5}]"
    inline, on_ray = (
        raypfl.run(experiment(tmp_path, rounds=2, data__augmentation=augmentations, **place)) for place in ({}, ON_RAY)
    )
    assert inline.weights_hash == on_ray.weights_hash


@pytest.mark.parametrize(
    "data", ["tests.support.federated_data:GeneratedClients", "tests.learning.test_multi_label:marked"]
)
def test_images_of_described_clients_and_with_several_labels_are_changed_too(tmp_path, data):
    (tmp_path / "clients").write_text("12")
    place = {"data__root": tmp_path} if "GeneratedClients" in data else {}
    base = experiment(tmp_path, data=data, **place, method="fedavg", rounds=1, evaluation__protocols="[local]")
    runs = [raypfl.run(base.override([f"data.augmentation={a}"])) for a in ("[]", AUGMENTED)]
    assert runs[0].weights_hash != runs[1].weights_hash


def test_points_in_the_plane_are_no_images_to_change(tmp_path):
    with pytest.raises(ConfigError, match=r"for images, but the samples of 'spiral' are 2x1x1"):
        raypfl.run(experiment(tmp_path, data="spiral", data__augmentation="[flip]"))


# Descriptions


def test_a_description_keeps_names_options_and_their_order():
    described = raypfl.Experiment(data={"augmentation": ["flip", {"name": "crop", "padding": 2}, "cutout"]})
    assert described.data.augmentation == (Flip(), Crop(padding=2), Cutout())
    assert raypfl.Experiment.from_yaml(described.to_yaml()) == described
    assert described.to_dict()["data"]["augmentation"][0] == {"name": "flip", "p": 0.5}
    assert raypfl.Experiment(data=DataConfig(augmentation=(Flip(),))).override(["seed=1"]).data.augmentation == (
        Flip(),
    )
    assert described.override(["data.augmentation=[]"]).data.augmentation == ()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("[corp]", r"no augmentation called 'corp'; did you mean 'crop'"),
        ("crop", r"data.augmentation is 'crop'; it must be a list"),
        ("[{padding: 3}]", r"data.augmentation has options \(padding\), but no name; add one of these"),
        ("[{name: crop, pading: 3}]", r"pading is not an option of crop; did you mean 'data.augmentation.padding'"),
        ("[{name: crop, fill: white}]", r"data.augmentation.fill.*'black' or 'mean'"),
        ("[{name: crop, padding: 0}]", r"padding is 0, but must be at least 1"),
        ("[{name: cutout, size: 0}]", r"size is 0, but must be at least 1"),
        ("[{name: flip, p: 1.5}]", r"p is 1.5, but must be between 0 and 1"),
        ("[4]", r"data.augmentation is 4; it must be a name, or options"),
        ("['raypfl.data:IID']", r"data.augmentation is 'raypfl.data:IID', which is not a subclass of Augmentation"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_a_sentence(given, sentence):
    with pytest.raises(ConfigError, match=sentence):
        raypfl.Experiment().override([f"data.augmentation={given}"])


def test_names_in_a_python_object_and_augmented_pools_are_refused():
    with pytest.raises(ConfigError, match=r"data.augmentation has 'crop'; from Python"):
        DataConfig(augmentation=("crop",))
    with pytest.raises(ConfigError, match=r"data.pools.auxiliary.augmentation is not an option of digits"):
        raypfl.Experiment(data={"pools": {"auxiliary": {"name": "digits", "augmentation": ["flip"]}}})
