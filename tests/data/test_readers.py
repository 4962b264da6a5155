"""Published data sets are read to the pixel, and what is damaged in them is named."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from raypfl.common.errors import ConfigError, DataError
from raypfl.data import ByColumn, ClassesPerClient, FederatedData
from raypfl.data.datasets import DataConfig, DataSource
from tests.support import datasets


def held_for_tests(data: FederatedData) -> np.ndarray:
    """The samples that clients test on, ascending."""
    return np.sort(np.concatenate([data.indices(client, "test") for client in range(data.num_clients)]))


# --- CIFAR ------------------------------------------------------------------------------------------------------------


def test_cifar10_equals_what_torchvision_reads(tmp_path, opened, monkeypatch):
    from torchvision.datasets import CIFAR10

    datasets.cifar10(tmp_path / "data")
    monkeypatch.setattr(CIFAR10, "_check_integrity", lambda self: True)  # of the published archive's hashes
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *args: True)
    train = CIFAR10(tmp_path / "data", train=True)
    test = CIFAR10(tmp_path / "data", train=False)
    ours = opened("cifar10")

    images = np.concatenate([train.data, test.data])
    assert np.array_equal(images.transpose(0, 3, 1, 2), ours.inputs)
    assert train.targets + test.targets == ours.labels.tolist()
    assert train.classes == ours.class_names and held_for_tests(ours).tolist() == list(range(20, 24))


@pytest.mark.parametrize(("variant", "classes", "last"), [("fine", 100, 39), ("coarse", 20, 19)])
def test_cifar100_has_fine_and_coarse_labels(tmp_path, opened, variant, classes, last):
    datasets.cifar100(tmp_path / "data")
    data = opened("cifar100", variant=variant)
    assert (data.num_classes, data.labels[39], len(data.labels)) == (classes, last, 60)


def damaged_batch(root: Path, **changes) -> Path:
    path = root / "cifar-10-batches-py/data_batch_3"
    return datasets.pickled(path, {"data": datasets.pixels(4, 3072), "labels": [0, 1, 2, 3], **changes})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"labels": [0, 1, 10, 3]}, r"Index 2 of .*data_batch_3 has label 10, but there are 10 classes"),
        ({"labels": [0, 1, 2]}, r"data_batch_3 has 4 images, but 3 labels; index 3 has no label"),
        ({"labels": [0, 1, 2, 3, 4]}, r"data_batch_3 has 4 images, but 5 labels; index 4 has no image"),
        ({"labels": np.array([0, 1, 2])}, r"data_batch_3 has 4 images, but 3 labels; index 3 has no label"),
        ({"labels": None}, r"data_batch_3 has no list of 'labels'"),
        ({"labels": [0, 1, None, 3]}, r"Index 2 of .*data_batch_3 has label None, which is not an integer"),
        ({"labels": [0, 1, 2.5, 3]}, r"Index 2 of .*data_batch_3 has label 2\.5, which is not an integer"),
        ({"data": datasets.pixels(4, 3071)}, r"'data' in .*data_batch_3 is uint8\[4, 3071\], not uint8\[n, 3072\]"),
        ({"data": None}, r"'data' in .*data_batch_3 is NoneType"),
    ],
)
def test_a_damaged_batch_of_cifar_is_named_with_its_row(tmp_path, opened, changes, sentence):
    datasets.cifar10(tmp_path / "data")
    damaged_batch(tmp_path / "data", **changes)
    with pytest.raises(DataError, match=sentence):
        opened("cifar10")


@pytest.mark.parametrize(
    ("name", "damage", "sentence"),
    [
        ("train", lambda path: datasets.cut_short(path), r"cifar-100-python/train is damaged"),
        (
            "meta",
            lambda path: datasets.pickled(path, {}),
            r"cifar-100-python/meta has no list called 'fine_label_names'",
        ),
        (
            "test",
            lambda path: datasets.pickled(path, {"data": datasets.pixels(3, 3072), "fine_labels": [0, 99, 100]}),
            r"Index 2 of .*cifar-100-python/test has label 100, but there are 100 classes",
        ),
        (
            "test",
            lambda path: datasets.pickled(path, {"data": datasets.pixels(3, 3072), "coarse_labels": [0, 1, 2]}),
            r"cifar-100-python/test has no list of 'fine_labels'",
        ),
    ],
)
def test_a_damaged_cifar100_is_named(tmp_path, opened, name, damage, sentence):
    datasets.cifar100(tmp_path / "data")
    damage(tmp_path / "data/cifar-100-python" / name)
    with pytest.raises(DataError, match=sentence):
        opened("cifar100")


def test_a_batch_of_cifar_that_is_cut_short_or_would_run_code_is_refused(tmp_path, opened):
    datasets.cifar10(tmp_path / "data")
    path = damaged_batch(tmp_path / "data")
    path.write_bytes(path.read_bytes()[:-40])

    with pytest.raises(DataError, match=r"data_batch_3 is damaged"):
        opened("cifar10")

    path.write_bytes(pickle.dumps(Path.cwd))
    with pytest.raises(DataError, match=r"data_batch_3 is damaged: it contains .*, which a CIFAR batch does not"):
        opened("cifar10")


def test_a_missing_data_set_is_refused_with_how_to_get_it(tmp_path, opened):
    for name, archive in (("cifar10", "cs.toronto.edu"), ("mnist", "mnist"), ("emnist", "nist.gov")):
        with pytest.raises(ConfigError, match=rf"Set data.download to true to download it .*{archive}"):
            opened(name)
    with pytest.raises(ConfigError, match=r"data.root is missing: name the folder that CIFAR-10 is in"):
        opened("cifar10", root=None)


def test_torchvision_downloads_a_data_set_once_if_requested(tmp_path, opened, monkeypatch):
    fetched = []

    def fetch(root: str, download: bool) -> None:
        fetched.append((root, download))
        datasets.cifar10(Path(root))

    monkeypatch.setattr("torchvision.datasets.CIFAR10", fetch)
    assert len(opened("cifar10", download=True).labels) == 24
    assert len(opened("cifar10", download=True).labels) == 24
    assert fetched == [(str(tmp_path / "data"), True)]


def test_a_failed_download_says_where_to_get_the_data(opened, monkeypatch):
    def offline(*args, **options) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr("torchvision.datasets.MNIST", offline)
    with pytest.raises(DataError, match=r"MNIST could not be downloaded into .*: no route to host\. Get it from https"):
        opened("mnist", download=True)
    with pytest.raises(ConfigError, match="raypfl cannot download 'image_folder'; get its files"):
        opened("image_folder", download=True)


# --- IDX --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "folder"), [("mnist", "MNIST"), ("fashion_mnist", "FashionMNIST")])
@pytest.mark.parametrize("packed", [False, True])
def test_the_mnists_are_read_to_the_pixel_packed_or_not(tmp_path, opened, name, folder, packed):
    images = datasets.mnist(tmp_path / "data" / folder, packed=packed)
    data = opened(name)
    assert np.array_equal(data.inputs[:, 0], images)
    assert data.labels.tolist() == list(range(10)) * 3
    assert held_for_tests(data).tolist() == list(range(20, 30))


@pytest.mark.parametrize(
    ("variant", "classes"), [("balanced", 47), ("bymerge", 47), ("byclass", 62), ("letters", 26), ("digits", 10)]
)
def test_emnists_are_upright_and_their_classes_counted_from_zero(tmp_path, opened, variant, classes):
    from torchvision.datasets import EMNIST

    folder = tmp_path / "data/EMNIST"
    count = 26 if classes == 26 else 10
    images = datasets.mnist(folder, f"emnist-{variant}-train", f"emnist-{variant}-test", labels=count)
    data = opened("emnist", variant=variant)
    assert np.array_equal(data.inputs[:, 0], images.transpose(0, 2, 1))
    assert data.class_names == [name for name in EMNIST.classes_split_dict[variant] if name != "N/A"]
    assert (data.num_classes, data.labels[:3].tolist()) == (classes, [0, 1, 2])


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (
            lambda raw: datasets.cut_short(raw / "train-images-idx3-ubyte"),
            "should hold 20 items, but is cut short.* at index 19",
        ),
        (
            lambda raw: datasets.idx(raw / "train-labels-idx1-ubyte", np.arange(20)),
            "Index 10 of .*label 10.* 10 classes",
        ),
        (
            lambda raw: datasets.idx(raw / "train-labels-idx1-ubyte", np.zeros(19)),
            "images-idx3-ubyte holds 20 images, but .*train-labels-idx1-ubyte 19 labels: index 19 has no label",
        ),
        (
            lambda raw: datasets.idx(raw / "t10k-labels-idx1-ubyte", np.zeros(12)),
            "t10k-images-idx3-ubyte holds 10 images, but .* 12 labels: index 10 has no image. Get .*t10k-images",
        ),
        (
            lambda raw: datasets.idx(raw / "t10k-images-idx3-ubyte", np.zeros((10, 27, 28))),
            "t10k-images-idx3-ubyte holds images of 27 x 28, but .*train-images-idx3-ubyte of 28 x 28",
        ),
        (lambda raw: (raw / "t10k-images-idx3-ubyte").write_bytes(b"<html>"), "is not an IDX file of bytes in 3"),
        (lambda raw: datasets.idx(raw / "t10k-images-idx3-ubyte", np.zeros((10, 28))), "not an IDX file of bytes in 3"),
    ],
)
def test_a_damaged_idx_file_is_named(tmp_path, opened, damage, sentence):
    datasets.mnist(tmp_path / "data/MNIST")
    damage(tmp_path / "data/MNIST/raw")
    with pytest.raises(DataError, match=sentence):
        opened("mnist")


def test_a_bad_label_of_emnist_is_named_as_the_file_has_it(tmp_path, opened):
    folder = tmp_path / "data/EMNIST"
    datasets.mnist(folder, "emnist-letters-train", "emnist-letters-test", labels=26)
    datasets.idx(folder / "raw/emnist-letters-train-labels-idx1-ubyte", np.array([1, 2, 0] + 17 * [1]))
    with pytest.raises(DataError, match=r"Index 2 of .* has label 0, but there are 26 classes, counted from 1"):
        opened("emnist", variant="letters")


def test_a_packed_idx_file_that_is_cut_short_is_named(tmp_path, opened):
    datasets.mnist(tmp_path / "data/MNIST", packed=True)
    datasets.cut_short(tmp_path / "data/MNIST/raw/train-images-idx3-ubyte.gz")
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz is damaged"):
        opened("mnist")


def test_an_unknown_variant_is_refused(opened):
    for name, variant, variants in (("emnist", "own", "'balanced', 'bymerge'"), ("cifar10_1", "v5", "'v6' or 'v4'")):
        with pytest.raises(ConfigError, match=f"data.variant is '{variant}'; it must be {variants}"):
            opened(name, variant=variant)
    for severity in (6, "6th"):
        with pytest.raises(ConfigError, match=f"data.variant is {severity!r}, but CIFAR-10-C's severities are 1 to 5"):
            DataSource(name="cifar10_c", options={"variant": severity})


def test_a_label_too_large_for_a_class_is_refused_by_every_reader_of_numbers(tmp_path, opened):
    listed(tmp_path / "data", ["image,label", "images/0.png,0", "images/1.png,1000000000000"])
    with pytest.raises(DataError, match=r"Line 3 of train\.csv has label 1000000000000, but labels must be numbers of"):
        opened("csv")

    table = pa.table({"image": [datasets.encoded(datasets.pixels(4, 4))] * 2, "label": [10**12, 0]})
    pq.write_table(table, tmp_path / "data/all.parquet")
    with pytest.raises(DataError, match=r"Row 1 of all\.parquet has label 1000000000000, but labels must be numbers"):
        opened("parquet")

    np.save(tmp_path / "data/image.npy", datasets.pixels(2, 4, 4))
    np.save(tmp_path / "data/labels.npy", np.array([0, 10**12]))
    with pytest.raises(
        DataError, match=r"Index 1 of .*labels\.npy has label 1000000000000, but labels must be numbers"
    ):
        opened("npy")


def test_an_object_that_is_no_reader_is_refused_in_a_sentence(opened):
    with pytest.raises(DataError, match=r"The reader 'builtins:print' returns NoneType; it must return RawData"):
        opened("builtins:print")
    for name in ("math:pi", "builtins:int"):
        with pytest.raises(ConfigError, match=f"data is '{name}', which is not a function, a Reader or a Population"):
            opened(name)


def test_an_option_without_effect_is_refused_with_its_name(opened):
    with pytest.raises(ConfigError, match=r"data\.layout is not an option of csv; image_folder has it"):
        opened("csv", layout="class")
    with pytest.raises(ConfigError, match=r"data\.fit is 'crop', which has no effect without data\.size"):
        opened("csv", fit="crop")
    with pytest.raises(ConfigError, match=r"data\.uncertain is 'negative', .* while data\.label is one column"):
        opened("csv", uncertain="negative")
    with pytest.raises(ConfigError, match=r"The data set 'digits' cannot be read with these options: .*'size'"):
        DataConfig(options={"size": 8})


# --- folders ----------------------------------------------------------------------------------------------------------


def office_home(root: Path) -> Path:
    """Two domains of two classes, as Office-Home's folders are."""
    for d, domain in enumerate(("Art", "Real World")):
        for c, kind in enumerate(("Alarm_Clock", "Bed")):
            for i in range(3):
                shape = (8 + i, 6, 3)
                datasets.image(root / domain / kind / f"{i:05}.png", datasets.pixels(*shape, seed=100 * d + 10 * c + i))
    return root


def test_a_tree_of_images_has_classes_domains_and_one_size(tmp_path, opened):
    office_home(tmp_path / "data")
    (tmp_path / "data/ImageInfo.csv").write_text("not an image")
    data = opened("image_folder", ByColumn(), layout="group/class", size=8, test_fraction=0.34)

    assert data.class_names == ["Alarm_Clock", "Bed"]
    assert (data.input_shape, data.num_clients) == ((3, 8, 8), 2)

    for client, expected in enumerate((range(6), range(6, 12))):
        indices = np.concatenate([data.indices(client, "train"), data.indices(client, "test")])
        assert sorted(indices.tolist()) == list(expected)
    assert [data.label_counts("test")[k].tolist() for k in range(2)] == [[1, 1], [1, 1]]


def test_groups_are_told_from_classes_and_splits_are_no_classes(tmp_path, opened):
    office_home(tmp_path / "data")
    with pytest.warns(UserWarning, match=r"Art, Real World \(2\).* Alarm_Clock, Bed \(2\).* data\.layout=group/class"):
        assert opened("image_folder", size=8).class_names == ["Art", "Real World"]
    for new, old in (("train", "Art"), ("test", "Real World")):
        (tmp_path / "data" / old).rename(tmp_path / "data" / new)
    with pytest.raises(DataError, match=r"folders test, train \(2\).* data\.layout=split/class"):
        opened("image_folder", size=8)


def test_folders_within_classes_are_read(tmp_path, opened):
    for kind in ("cat", "dog"):
        for i in range(3):
            datasets.image(tmp_path / "data" / kind / "images" / f"{i}.png", datasets.pixels(4, 4, seed=i))
    assert opened("image_folder").class_names == ["cat", "dog"]


def test_images_of_other_formats_are_named_and_palettes_come_without_a_warning(tmp_path, opened, recwarn):
    for kind in ("cat", "dog"):
        datasets.image(tmp_path / "data" / kind / "0.png", datasets.pixels(4, 4, 3))
    with Image.open(tmp_path / "data/dog/0.png") as picture:
        palette = picture.convert("P")
    palette.save(tmp_path / "data/dog/0.png", transparency=b"\x00\x10")
    data = opened("image_folder", test_fraction=0)
    assert not recwarn and np.array_equal(data.inputs[1], np.asarray(palette.convert("RGB")).transpose(2, 0, 1))

    (tmp_path / "data/dog/1.HEIC").write_text("of a telephone")
    with pytest.warns(UserWarning, match=r"of other formats are left out: dog/1\.HEIC \(1\)\. Convert them"):
        opened("image_folder", size=8, test_fraction=0)


def test_linked_folders_are_read_as_torchvision_does_and_links_back_are_not_followed(tmp_path, opened):
    for folder in ("data/cat", "elsewhere"):
        for i in range(3):
            datasets.image(tmp_path / folder / f"{i}.png", datasets.pixels(4, 4, seed=i))
    (tmp_path / "data/dog").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/all").symlink_to(tmp_path / "data")
    data = opened("image_folder")
    assert data.class_names == ["cat", "dog"] and len(data.labels) == 6


def test_a_split_level_is_the_published_test_split_of_its_own_domain(tmp_path, opened):
    for domain, tests in (("Art", 2), ("Clipart", 4)):
        for split, count in (("train", 6), ("val", tests)):
            for i in range(count):
                datasets.image(
                    tmp_path / "data" / domain / split / "Bed" / f"{i}.png", datasets.pixels(4, 4, 3, seed=i)
                )

    data = opened("image_folder", ByColumn(), layout="group/split/class", val_fraction=0.2)
    assert data.sizes("test").tolist() == [2, 4]
    assert data.sizes("val").tolist() == [1, 1]
    assert data.sizes("train").tolist() == [5, 5]


def test_images_are_cropped_or_stretched_to_size(tmp_path, opened):
    picture = np.zeros((4, 8, 3), np.uint8)
    picture[:, 2:6] = 255
    for kind in range(8):
        datasets.image(tmp_path / "data" / f"{kind % 2}" / f"{kind}.png", picture)
    assert opened("image_folder", size=4, fit="crop").inputs.min() == 255
    assert opened("image_folder", size=4).inputs.min() < 100


@pytest.mark.parametrize(
    ("spoil", "options", "sentence"),
    [
        (
            lambda root: datasets.cut_short(root / "Art/Bed/00001.png", 60),
            {},
            "Art/Bed/00001.png holds a damaged image",
        ),
        (lambda root: (root / "Art/Bed/00001.png").write_bytes(b""), {}, "Art/Bed/00001.png holds a damaged image"),
        (
            lambda root: datasets.image(root / "Art/1.png", datasets.pixels(4, 4)),
            {},
            "Art/1.png does not lie in",
        ),
        (lambda root: None, {"size": None}, r"3 x 9 x 6 .* 3 x 8 x 6 .* example data\.size=64"),
        (lambda root: None, {"layout": "split/class"}, "lies in 'Art', but folders of splits are called train"),
    ],
)
def test_a_damaged_tree_of_images_is_named(tmp_path, opened, spoil, options, sentence):
    spoil(office_home(tmp_path / "data"))
    with pytest.raises(DataError, match=sentence):
        opened("image_folder", **{"layout": "group/class", "size": 8, **options})


def test_an_unknown_layout_is_refused(tmp_path, opened):
    office_home(tmp_path / "data")
    for layout in ("group", "domain/class", "class/class"):
        with pytest.raises(ConfigError, match=rf"data\.layout is '{layout}', but must name the levels of folders"):
            opened("image_folder", layout=layout)


def test_tiny_imagenet_is_read_as_it_unpacks(tmp_path, opened):
    datasets.tiny_imagenet(tmp_path / "data")
    data = opened("tiny_imagenet")
    assert data.class_names == ["Egyptian cat", "goldfish"]
    assert data.labels.tolist() == [0, 0, 0, 1, 1, 1, 0, 1, 0, 1]
    assert (tmp_path / "data/val/images/val_2.JPEG").read_bytes().startswith(b"\xff\xd8\xff")
    np.testing.assert_allclose(data.inputs[1], datasets.pixels(8, 8, 3, seed=1).transpose(2, 0, 1), atol=5)

    grey = np.repeat(datasets.pixels(8, 8, seed=2)[None], 3, axis=0)
    np.testing.assert_allclose(data.inputs[8], grey, atol=5)
    assert held_for_tests(data).tolist() == [6, 7, 8, 9]


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda root: (root / "wnids.txt").unlink(), r"wnids\.txt of .* cannot be read"),
        (lambda root: (root / "val/images/val_2.JPEG").unlink(), r"val/images/val_2\.JPEG.* no such file"),
        (
            lambda root: datasets.cut_short(root / "val/images/val_2.JPEG", 30),
            r"val/images/val_2\.JPEG holds a damaged image",
        ),
        (
            lambda root: (root / "val/val_annotations.txt").write_text("val_0.JPEG\tn02124075\nval_1.JPEG\tn999\n"),
            r"Line 2 of val/val_annotations\.txt has 'n999' for a class",
        ),
        (
            lambda root: (root / "val/val_annotations.txt").write_text(
                "val_0.JPEG\tn02124075\nval_2.JPEG\tn02124075\n"
            ),
            r"val/images/val_1\.JPEG of .* and 1 more have no line in val/val_annotations\.txt",
        ),
        (
            lambda root: datasets.image(root / "val/images/val_9.JPEG", datasets.pixels(8, 8)),
            r"val/images/val_9\.JPEG of .* and 0 more have no line in val/val_annotations\.txt; get",
        ),
        (
            lambda root: (root / "val/val_annotations.txt").write_text(
                "val_0.JPEG\tn02124075\nval_0.JPEG\tn01443537\n"
            ),
            r"Line 2 of val/val_annotations\.txt lists val_0\.JPEG, as line 1 does",
        ),
        (
            lambda root: (root / "wnids.txt").write_text("n02124075\nn01443537\nn00000001\n"),
            r"no image in train/n00000001/images",
        ),
    ],
)
def test_a_damaged_tiny_imagenet_is_named(tmp_path, opened, spoil, sentence):
    spoil(datasets.tiny_imagenet(tmp_path / "data"))
    with pytest.raises(DataError, match=sentence):
        opened("tiny_imagenet")


def test_blank_lines_in_the_lists_of_tiny_imagenet_are_ignored(tmp_path, opened):
    root = datasets.tiny_imagenet(tmp_path / "data")
    before = opened("tiny_imagenet")
    for name in ("wnids.txt", "words.txt", "val/val_annotations.txt"):
        (root / name).write_text(f"\n{(root / name).read_text()}\n  \n")
    after = opened("tiny_imagenet")
    assert (after.labels.tolist(), after.class_names) == (before.labels.tolist(), before.class_names)


def test_a_changed_list_of_tiny_imagenet_is_read_again(tmp_path, opened):
    root = datasets.tiny_imagenet(tmp_path / "data")
    before = opened("tiny_imagenet")
    listed_there = root / "val/val_annotations.txt"
    listed_there.write_text(listed_there.read_text().replace("val_0.JPEG\tn02124075", "val_0.JPEG\tn01443537"))
    assert (before.labels[6], opened("tiny_imagenet").labels[6]) == (0, 1)
    (root / "words.txt").unlink()
    assert opened("tiny_imagenet").class_names == ["n02124075", "n01443537"]


# --- CSV --------------------------------------------------------------------------------------------------------------

XRAYS = [("1.0", "", "0.0", "-1.0", ""), ("", "", "", "", ""), ("0.0", "1.0", "1.0", "", "-1.0"), ("", "", "", "", "")]


@pytest.mark.parametrize(("uncertain", "counted"), [("positive", 1), ("negative", 0)])
def test_chexpert_has_five_labels_and_uncertain_ones_count_as_the_settings_say(tmp_path, opened, uncertain, counted):
    datasets.chexpert(tmp_path / "data", XRAYS)
    data = opened("chexpert", uncertain=uncertain, size=8)
    assert data.class_names == ["Cardiomegaly", "Edema", "Consolidation", "Atelectasis", "Pleural Effusion"]
    assert data.labels.tolist() == [[1, 0, 0, counted, 0], [0] * 5, [0, 1, 1, 0, counted], [0] * 5]
    assert data.kind == "labels" and data.input_shape == (1, 8, 8)
    counts = data.label_counts("train") + data.label_counts("test")
    assert counts.sum(axis=0).tolist() == data.labels.sum(axis=0).tolist()
    assert data.label_counts("val").tolist() == [[0] * 5] * 2


def test_combinations_of_labels_are_dealt_out_and_rare_ones_counted_as_one(tmp_path, opened):
    kinds = [("1.0", "", "", "", "")] * 20 + [("", "1.0", "", "", "")] * 20 + [("", "", "1.0", "", "")] * 4
    datasets.chexpert(tmp_path / "data", kinds + [("1.0", "1.0", "1.0", "", "")] * 4)
    data = opened("chexpert", ClassesPerClient(clients=3, classes=1), rare=10, size=4)
    counts = data.label_counts("train") + data.label_counts("test")
    assert sorted(map(tuple, counts[:, :3].tolist())) == [(0, 20, 0), (4, 4, 8), (20, 0, 0)]


def listed(root: Path, lines: list[str], images: int = 3) -> Path:
    for i in range(images):
        datasets.image(root / f"images/{i}.png", datasets.pixels(6, 6, 3, seed=i))
    (root / "train.csv").write_text("\n".join(lines) + "\n")
    return root


def test_images_listed_in_a_csv_file_have_classes_and_writers(tmp_path, opened):
    lines = ["image,label,writer", "images/2.png,dog,w1", "images/0.png,cat,w0", "images/1.png,dog,w1"]
    listed(tmp_path / "data", lines)
    data = opened("csv", ByColumn(), group="writer")
    assert (data.class_names, data.labels.tolist()) == (["cat", "dog"], [1, 0, 1])
    assert np.array_equal(data.inputs[0], datasets.pixels(6, 6, 3, seed=2).transpose(2, 0, 1))
    assert data.num_clients == 2


def test_csv_files_named_test_are_the_published_test_split(tmp_path, opened):
    root = listed(tmp_path / "data", ["image,label", "images/0.png,0", "images/1.png,1"])
    (root / "test.csv").write_text("image,label\nimages/2.png,1\n")
    data = opened("csv")
    assert data.sizes("test").sum() == 1
    assert opened("csv", files="train.csv", test_fraction=0).labels.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        (
            ["image,label", "", "images/0.png,0", "images/9.png,1"],
            r"Line 4 of train\.csv names the image .*data/images/9\.png",
        ),
        (["image,label", "images/0.png,0", "images/1.png,"], r"Line 3 of train\.csv has no 'label'"),
        (
            ["image,label", "images/0.png,0", "images/1.png,-1"],
            r"Line 3 of train\.csv has label -1, but labels must be numbers",
        ),
        (["image,label", "images/0.png,0", ",1"], r"Line 3 of train\.csv has no 'image'"),
        (["image,label", "images/0.png,0", "images/1.png"], r"Line 3 of train\.csv has 1 columns, but its header 2"),
    ],
)
def test_a_bad_row_of_a_csv_file_is_named(tmp_path, opened, lines, sentence):
    listed(tmp_path / "data", lines)
    with pytest.raises(DataError, match=sentence):
        opened("csv")


def test_a_truncated_image_of_a_csv_file_is_named_with_its_row(tmp_path, opened):
    root = listed(tmp_path / "data", ["image,label", "images/0.png,0", "images/1.png,1"])
    datasets.cut_short(root / "images/1.png", 40)
    with pytest.raises(DataError, match=r"Line 3 of train\.csv holds a damaged image"):
        opened("csv")


@pytest.mark.parametrize("root", [None, "nonesuch"])
def test_whoever_has_a_table_of_features_learns_that_csv_reads_images_before_there_is_a_folder(root):
    with pytest.raises(ConfigError, match=r"tables of images \(data=table reads tables of features\)\."):
        DataConfig(name="csv", root=root).read()


def test_labels_out_of_range_and_missing_columns_of_a_csv_file_are_named(tmp_path, opened):
    listed(tmp_path / "data", ["image,edema,cardiomegaly", "images/0.png,1,0", "images/1.png,2,0"])
    with pytest.raises(DataError, match=r"Line 3 of train\.csv has 2 for 'edema', which must be 1, 0, -1 or empty"):
        opened("csv", label=["edema", "cardiomegaly"])

    listed(tmp_path / "data", ["image,edema,cardiomegaly", "images/0.png,1,0", "images/1.png,maybe,0"])
    with pytest.raises(DataError, match=r"Line 3 of train\.csv has 'maybe' for 'edema', which must be"):
        opened("csv", label=["edema", "cardiomegaly"])
    with pytest.raises(ConfigError, match=r"no column 'edma', .* names \(did you mean 'edema'\?\); its columns"):
        opened("csv", label=["edma", "cardiomegaly"])
