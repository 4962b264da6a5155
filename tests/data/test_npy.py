"""Pairs of ``.npy`` files, such as CIFAR-10.1 and CIFAR-10-C, are read to the pixel; damaged files are named."""

from __future__ import annotations

import numpy as np
import pytest

import raypfl
from raypfl.common.errors import ConfigError, DataError
from tests.support import datasets
from tests.support.runs import experiment


def test_cifar10_c_is_read_by_corruption_and_severity(tmp_path, opened):
    root = datasets.cifar10_c(tmp_path / "data")
    all_five = opened("cifar10_c", image="snow.npy")
    fourth = opened("cifar10_c", image="snow.npy", variant=4)

    assert np.array_equal(all_five.inputs, np.load(root / "snow.npy").transpose(0, 3, 1, 2))
    assert np.array_equal(fourth.inputs, all_five.inputs[12:16])
    assert fourth.class_names == datasets.CIFAR10_CLASSES


def test_all_corruptions_are_one_pool_whose_accuracy_is_the_mean_over_corruptions(tmp_path):
    root = tmp_path / "data"
    datasets.cifar10(root)
    datasets.cifar10_c(root / "CIFAR-10-C", each=8, corruptions=("snow", "fog", "frost"))
    np.save(root / "cifar10.1_v6_data.npy", datasets.pixels(6, 32, 32, 3))
    np.save(root / "cifar10.1_v6_labels.npy", np.arange(6))
    corrupted = {"name": "cifar10_c", "root": str(root / "CIFAR-10-C")}
    new = {"name": "cifar10_1", "root": str(root)}
    pools = {"ood/all": corrupted | {"image": "all"}, "ood/c-*": corrupted, "ood/new": new}
    protocols = ["ood/all", "ood/new", "ood/c-fog", "ood/c-frost", "ood/c-snow"]
    settings = experiment(tmp_path, method="fedavg", rounds=1, cohort__size=2, partition__clients=2)
    settings = settings.replace(data={"name": "cifar10", "root": str(root), "pools": pools})
    result = raypfl.run(settings.replace(evaluation={"protocols": protocols}))
    rows = {row["protocol"]: row for row in result.evaluations.to_pylist() if row["client"] == -1}

    sizes = dict(zip(protocols, [120, 6, 40, 40, 40], strict=True))
    assert {name: row["samples"] for name, row in rows.items()} == sizes
    assert rows["ood/all"]["accuracy"] == pytest.approx(np.mean([rows[name]["accuracy"] for name in protocols[2:]]))
    assert len({row["loss"] for row in rows.values()}) == 5


def test_cifar10_c_that_is_not_five_severities_of_equal_length_is_refused(tmp_path, opened):
    root = datasets.cifar10_c(tmp_path / "data")
    for name in ("snow.npy", "labels.npy"):
        np.save(root / name, np.load(root / name)[:-1])
    with pytest.raises(DataError, match=r"snow\.npy holds 19 images, not 5 severities of one length"):
        opened("cifar10_c", image="snow.npy", variant=4)


@pytest.mark.parametrize("shape", [(32, 32), (32, 32, 1), (28, 32, 3), (64, 64, 3)])
@pytest.mark.parametrize(
    ("name", "image", "label"),
    [
        ("cifar10_1", "cifar10.1_v6_data.npy", "cifar10.1_v6_labels.npy"),
        ("cifar10_c", "fog.npy", "labels.npy"),
    ],
)
def test_images_that_are_not_of_cifar10s_shape_are_refused(tmp_path, opened, name, image, label, shape):
    (tmp_path / "data").mkdir()
    np.save(tmp_path / "data" / image, datasets.pixels(5, *shape))
    np.save(tmp_path / "data" / label, np.zeros(5, int))
    shown_shape = ", ".join(map(str, (5, *shape)))
    sentence = rf"{image} holds images as uint8\[{shown_shape}\], but CIFAR-10's are uint8\[n, 32"
    with pytest.raises(DataError, match=sentence):
        opened(name, **({"image": image} if name == "cifar10_c" else {}))


def test_cifar10_1_is_read_to_the_pixel(tmp_path, opened):
    (tmp_path / "data").mkdir()
    images = datasets.pixels(5, 32, 32, 3)
    for variant, rows in (("v4", slice(0, 3)), ("v6", slice(0, 5))):
        np.save(tmp_path / f"data/cifar10.1_{variant}_data.npy", images[rows])
        np.save(tmp_path / f"data/cifar10.1_{variant}_labels.npy", np.array([0, 9, 3, 1, 7], np.int32)[rows])

    data = opened("cifar10_1")
    assert np.array_equal(data.inputs, images.transpose(0, 3, 1, 2))
    assert (data.labels.tolist(), data.class_names) == ([0, 9, 3, 1, 7], datasets.CIFAR10_CLASSES)
    assert opened("cifar10_1", variant="v4").labels.tolist() == [0, 9, 3]


def test_a_variant_may_be_written_as_a_number_or_as_text():
    severities = [raypfl.Experiment(data={"name": "cifar10_c", "variant": variant}).data for variant in (4, "4")]
    assert severities[0] == severities[1] and severities[0].options == {"variant": 4}


def test_a_pair_of_npy_files_is_read(tmp_path, opened):
    (tmp_path / "data").mkdir()
    images = datasets.pixels(5, 6, 7)
    np.save(tmp_path / "data/x.npy", images)
    np.save(tmp_path / "data/coloured.npy", datasets.pixels(5, 6, 7, 3))
    np.save(tmp_path / "data/y.npy", np.array([0, 2, 1, 2, 0], np.uint8))
    data = opened("npy", image="x.npy", label="y.npy")

    assert np.array_equal(data.inputs, images[:, None])

    coloured = opened("npy", image="coloured.npy", label="y.npy")
    assert np.array_equal(coloured.inputs, datasets.pixels(5, 6, 7, 3).transpose(0, 3, 1, 2))
    assert (data.input_shape, data.labels.tolist(), data.num_classes) == ((1, 6, 7), [0, 2, 1, 2, 0], 3)


@pytest.mark.parametrize("shape", [(6, 7, 3), (6, 7, 1), (3, 7, 3), (1, 7, 3), (6, 3, 1)])
def test_channels_may_be_first_unless_they_could_be_last(tmp_path, opened, shape):
    (tmp_path / "data").mkdir()
    last = datasets.pixels(5, *shape)
    np.save(tmp_path / "data/labels.npy", np.arange(5) % 2)
    read = []
    for images in (last, last.transpose(0, 3, 1, 2)):
        np.save(tmp_path / "data/image.npy", images)
        read.append(np.array(opened("npy").inputs))

    assert np.array_equal(read[0], last.transpose(0, 3, 1, 2))
    assert np.array_equal(*read) == (last.shape[2] not in (1, 3))


@pytest.mark.parametrize(
    ("images", "labels", "sentence"),
    [
        (
            datasets.pixels(4, 8, 8, 3),
            np.array([0, 1, 2]),
            r"image\.npy holds 4 images, but .*labels\.npy 3 labels: index 3 has no label\. Get .*labels\.npy again",
        ),
        (
            datasets.pixels(4, 8, 8, 3),
            np.arange(6),
            r"image\.npy holds 4 images, but .*labels\.npy 6 labels: index 4 has no image\. Get .*image\.npy again",
        ),
        (datasets.pixels(4, 8, 8, 3), np.array([0, 1, np.nan, 2]), r"Index 2 of .*labels\.npy has label nan"),
        (
            datasets.pixels(4, 8, 8, 3),
            np.array(["a", "b", "c", "d"]),
            r"labels in .*labels\.npy are <U1\[4\]; they must be",
        ),
        (datasets.pixels(4, 8, 8, 3), np.array(3), r"labels in .*labels\.npy are int64\[\]; they must be"),
        (datasets.pixels(4, 8, 8, 3), np.array([0, 1, -1, 2]), r"Index 2 of .*labels\.npy has label -1"),
        (
            datasets.pixels(4, 8, 8, 3),
            np.zeros((4, 2), int),
            r"labels in .*labels\.npy are int64\[4, 2\]; they must be",
        ),
        (datasets.pixels(4, 8, 8, 3) / 255, np.zeros(4, int), r"image\.npy holds float64\[4, 8, 8, 3\], not images"),
        (datasets.pixels(4, 64), np.zeros(4, int), r"image\.npy holds uint8\[4, 64\], not images"),
        (np.array([{}, 1]), np.zeros(2, int), r"image\.npy is damaged, or not a \.npy file"),
    ],
)
def test_a_damaged_pair_of_npy_files_is_named(tmp_path, opened, images, labels, sentence):
    (tmp_path / "data").mkdir()
    np.save(tmp_path / "data/image.npy", images)
    np.save(tmp_path / "data/labels.npy", labels)
    with pytest.raises(DataError, match=sentence):
        opened("npy")


@pytest.mark.parametrize("name", ["image.npy", "labels.npy"])
@pytest.mark.parametrize("by", [5, 200])
def test_a_npy_file_that_is_cut_short_is_named(tmp_path, opened, name, by):
    (tmp_path / "data").mkdir()
    np.save(tmp_path / "data/image.npy", datasets.pixels(40, 8, 8))
    np.save(tmp_path / "data/labels.npy", np.zeros(40, int))
    datasets.cut_short(tmp_path / "data" / name, by)
    with pytest.raises(DataError, match=rf"{name} is damaged, or not a \.npy file"):
        opened("npy")


def test_cifar10_1_has_cifar10s_classes_and_no_others(tmp_path, opened):
    (tmp_path / "data").mkdir()
    np.save(tmp_path / "data/cifar10.1_v6_data.npy", datasets.pixels(4, 32, 32, 3))
    np.save(tmp_path / "data/cifar10.1_v6_labels.npy", np.array([0, 9, 3, 10]))
    with pytest.raises(
        DataError, match=r"Index 3 of .*cifar10\.1_v6_labels\.npy has label 10, but there are 10 classes"
    ):
        opened("cifar10_1")
    with pytest.raises(ConfigError, match=r"no cifar10\.1_v4_data\.npy in .*; there is cifar10\.1_v6_data\.npy"):
        opened("cifar10_1", variant="v4")
