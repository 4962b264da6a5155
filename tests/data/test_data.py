"""The federated store: its samples, who holds them, its cache and damage to it."""

from __future__ import annotations

import json
import pickle
import re
import warnings
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_diabetes, load_digits

from raypfl.common.errors import ConfigError, DataError
from raypfl.data import IID, Dirichlet, FederatedData, Traits, load_federated
from raypfl.data.arrow_file import receive_arrays
from raypfl.data.datasets import DataConfig, RawData, Reader
from raypfl.data.datasets.settings import SPLITS
from raypfl.data.splits import allocate
from raypfl.data.store import PreparedDataMissing
from tests.support import datasets
from tests.support.datasets import encoded

SMALL = IID(clients=2)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> FederatedData:
    config = DataConfig(val_fraction=0.1, pools={"auxiliary": 0.2})
    return load_federated(config, Dirichlet(), seed=0, cache=tmp_path_factory.mktemp("cache"))


def all_held(data: FederatedData) -> np.ndarray:
    """The numbers of all samples that a client or a pool holds."""
    indices = [data.pool(name) for name in data.pools]
    for client in range(data.num_clients):
        indices += [data.indices(client, split) for split in SPLITS]
    return np.concatenate(indices)


# --- digits -----------------------------------------------------------------------------------------------------------


def test_digits_are_scikit_learns_to_the_pixel(digits):
    published = load_digits()
    assert np.array_equal(digits.inputs[:, 0], published.images)
    assert np.array_equal(digits.labels, published.target)
    assert (digits.input_shape, digits.num_classes, digits.scale) == ((1, 8, 8), 10, 16.0)
    assert (digits.inputs.dtype, digits.labels.dtype) == (np.uint8, np.int64)


def test_diabetes_patients_are_scikit_learns(tmp_path):
    published = load_diabetes(scaled=False)
    patients = load_federated(DataConfig(name="diabetes"), SMALL, seed=0, cache=tmp_path)
    assert np.array_equal(patients.inputs, published.data)
    assert np.array_equal(patients.labels, published.target)


def test_a_scikit_learn_without_its_data_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr("raypfl.data.datasets.readers.scikit.find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"has no digits.csv.gz; reinstall it with `pip install scikit-learn`"):
        load_federated(DataConfig(), SMALL, seed=0, cache=tmp_path)


def test_every_sample_is_held_exactly_once(digits):
    assert np.array_equal(np.sort(all_held(digits)), np.arange(1797))
    assert len(digits.pool("auxiliary")) == 1797 - int(0.8 * 1797)


def test_sizes_and_label_counts_agree_with_the_samples_held(digits):
    for split in SPLITS:
        indices = [digits.indices(client, split) for client in range(digits.num_clients)]
        assert digits.sizes(split).tolist() == [len(samples) for samples in indices]
        expected = [np.bincount(digits.labels[samples], minlength=10) for samples in indices]
        assert np.array_equal(digits.label_counts(split), expected)


def test_samples_are_normalised_by_the_training_samples_alone(digits):
    training = np.concatenate([digits.indices(client) for client in range(digits.num_clients)])
    pixels = digits.inputs[training] / 16.0
    np.testing.assert_allclose(digits.mean, [pixels.mean()], rtol=1e-6)
    np.testing.assert_allclose(digits.std, [pixels.std()], rtol=1e-6)
    assert digits.mean.dtype == digits.std.dtype == np.float32


def test_the_arrays_of_the_store_are_read_only(digits):
    for array in (digits.inputs, digits.labels, digits.indices(0), digits.pool("auxiliary")):
        assert not array.flags.writeable


def test_an_unknown_split_or_client_is_refused_with_a_sentence(digits):
    with pytest.raises(ConfigError, match=r"no split called 'tset'; did you mean 'test'\?"):
        digits.indices(0, "tset")
    with pytest.raises(ConfigError, match="no client 20; clients are numbered from 0 to 19"):
        digits.indices(20)


def test_a_partition_that_cannot_be_met_names_the_data_set(tmp_path):
    with pytest.raises(ConfigError, match=r"'digits' cannot be partitioned: partition.clients is 2000"):
        load_federated(DataConfig(), IID(clients=2000), seed=0, cache=tmp_path)


def test_clients_with_too_few_samples_for_a_test_sample_are_announced(tmp_path):
    for _ in range(2):  # also when the data are in the cache
        with pytest.warns(
            UserWarning, match=r"No client of .*:dozen' has a test sample: .* set partition\.clients below 12"
        ):
            data = load_federated(DataConfig(name=f"{__name__}:dozen"), IID(clients=12), seed=0, cache=tmp_path)
        assert data.sizes("test").sum() == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_federated(DataConfig(name=f"{__name__}:dozen"), IID(clients=6), seed=0, cache=tmp_path)
        load_federated(DataConfig(name=f"{__name__}:dozen", test_fraction=0), IID(clients=12), seed=0, cache=tmp_path)


def dozen(config: DataConfig) -> RawData:
    """Twelve samples."""
    return RawData(np.zeros((12, 1, 2, 2), np.uint8), np.arange(12) % 2, ["even", "odd"])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"test_fraction": 1.2}, "data.test_fraction is 1.2, but must be at least 0 and below 1"),
        ({"test_fraction": 0.5, "val_fraction": 0.5}, "leaves no training samples"),
        ({"split": "own"}, "data.split is 'own', but must be 'auto' or 'merged'"),
    ],
)
def test_options_out_of_range_are_refused_with_a_sentence(options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        DataConfig(**options)


# --- splits -----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 120), st.data(), st.integers(0, 2**31))
@settings(max_examples=50)
def test_a_client_with_two_samples_trains_on_one_and_tests_on_one(samples, data, seed):
    clients = data.draw(st.integers(1, samples))
    config = DataConfig(test_fraction=data.draw(st.floats(0.01, 0.6)), val_fraction=data.draw(st.floats(0, 0.3)))
    labels = np.zeros(samples, dtype=np.int64)
    unpublished = np.zeros(samples, dtype=bool)
    holdings = allocate(Traits(labels, 1), unpublished, config, IID(clients=clients), seed)
    train, _, test = (np.bincount(holdings.client[holdings.split == code], minlength=clients) for code in range(3))
    several = np.bincount(holdings.client, minlength=clients) >= 2

    assert (train >= 1).all()
    assert (test[several] >= 1).all()


def published_problem() -> tuple[np.ndarray, np.ndarray]:
    """Labels and test mask of 4,000 training and 1,000 test samples of 5 balanced classes."""
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(5), 1000))
    published_test = np.zeros(5000, dtype=bool)
    published_test[4000:] = True
    return labels, published_test


def test_a_published_test_split_is_shared_in_the_class_proportions_of_the_clients_training_samples():
    labels, published_test = published_problem()
    holdings = allocate(Traits(labels, 5), published_test, DataConfig(), Dirichlet(clients=8), 0)
    assert np.array_equal(holdings.split == SPLITS.index("test"), published_test)

    for label in range(5):
        of_label = labels == label
        train = np.bincount(holdings.client[of_label & ~published_test], minlength=8)
        test = np.bincount(holdings.client[of_label & published_test], minlength=8)
        assert (np.abs(test - train * test.sum() / train.sum()) < 1).all()


def test_published_test_samples_of_a_class_that_nobody_trains_on_are_shared_by_size():
    labels = np.array([0] * 10 + [1] * 6)
    holdings = allocate(Traits(labels, 2), labels == 1, DataConfig(), IID(clients=2), 0)
    assert np.bincount(holdings.client[labels == 1]).tolist() == [3, 3]


def test_a_merged_split_lets_clients_train_on_published_test_samples():
    labels, published_test = published_problem()
    holdings = allocate(Traits(labels, 5), published_test, DataConfig(split="merged"), IID(clients=10), 0)
    assert (holdings.split[published_test] == SPLITS.index("train")).any()
    assert np.bincount(holdings.client[holdings.split == SPLITS.index("test")]).tolist() == [125] * 10


# --- the cache --------------------------------------------------------------------------------------------------------


def test_a_second_opening_reads_the_cache_and_not_the_data_set(tmp_path, monkeypatch):
    first = load_federated(DataConfig(), SMALL, seed=0, cache=tmp_path)
    monkeypatch.setattr("raypfl.data.datasets.readers.scikit._read", None)
    again = load_federated(DataConfig(), Dirichlet(), seed=0, cache=tmp_path)
    assert np.array_equal(first.inputs, again.inputs)


class OfThisFile(Reader):
    """Twelve samples, from a file that is not in data.root."""

    def paths(self) -> list[Path]:
        return [Path(__file__)]

    def read(self) -> RawData:
        return dozen(self.config)


def test_files_without_a_root_are_read_once_from_whatever_folder_runs_are_started(tmp_path, monkeypatch):
    for name in ("here", "here/below"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        load_federated(DataConfig(name=f"{__name__}:OfThisFile"), SMALL, seed=0, cache=tmp_path / "cache")
    assert len(list(tmp_path.glob("cache/*/samples.arrow"))) == 1


def test_the_fingerprint_tells_seeds_and_partitions_apart_but_not_machines(tmp_path):
    def fingerprint(partition=SMALL, seed=0, cache="a", **options):
        return load_federated(DataConfig(**options), partition, seed=seed, cache=tmp_path / cache).fingerprint

    assert fingerprint() == fingerprint(cache="another_machine")
    assert len({fingerprint(), fingerprint(seed=1), fingerprint(IID(clients=3)), fingerprint(test_fraction=0.5)}) == 4


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def one_bit_flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [datasets.cut_short, emptied, one_bit_flipped])
@pytest.mark.parametrize("file", ["samples.arrow", "partitions/*.arrow"])
def test_a_damaged_cache_file_is_built_again_with_a_warning(tmp_path, file, damage):
    sound = load_federated(DataConfig(), SMALL, seed=0, cache=tmp_path).fingerprint
    damage(next(tmp_path.glob(f"*/{file}")))
    with pytest.warns(UserWarning, match="is damaged and is built again"):
        assert load_federated(DataConfig(), SMALL, seed=0, cache=tmp_path).fingerprint == sound
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_federated(DataConfig(), SMALL, seed=0, cache=tmp_path)


def test_a_failed_build_of_the_store_leaves_nothing_behind(tmp_path):
    with pytest.raises(DataError):
        load_federated(DataConfig(name=f"{__name__}:fails_in_the_second_block"), SMALL, seed=0, cache=tmp_path)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def fails_in_the_second_block(config: DataConfig) -> RawData:
    """A reader that fails after its first block."""

    def blocks():
        yield np.zeros((2, 1, 2, 2), np.uint8)
        raise DataError("The second half is damaged.")

    return RawData(blocks(), np.zeros(4, np.int64), ["only"])


def test_a_cache_that_cannot_be_written_says_how_to_name_another(tmp_path):
    (tmp_path / "occupied").write_text("a file, not a folder")
    with pytest.raises(DataError, match=r"cannot be written.*data\.cache.*RAYPFL_CACHE"):
        load_federated(DataConfig(), SMALL, seed=0, cache=tmp_path / "occupied")


def test_the_environment_and_the_config_name_the_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYPFL_CACHE", str(tmp_path / "environment"))
    load_federated(DataConfig(), SMALL, seed=0)
    load_federated(DataConfig(cache=str(tmp_path / "config")), SMALL, seed=0)
    assert {path.parts[len(tmp_path.parts)] for path in tmp_path.rglob("samples.arrow")} == {"environment", "config"}


def test_federated_data_is_pickled_as_a_reference(digits):
    pickled = pickle.dumps(digits)
    again = pickle.loads(pickled)
    assert len(pickled) < 2000
    assert again.fingerprint == digits.fingerprint
    assert np.array_equal(again.indices(3, "test"), digits.indices(3, "test"))


# --- Parquet ----------------------------------------------------------------------------------------------------------


def colours(count: int, seed: int = 0) -> list[np.ndarray]:
    return list(np.random.default_rng(seed).integers(0, 256, (count, 6, 5, 3), dtype=np.uint8))


def write_table(path: Path, images: list, labels: list, names: list[str] | None = None) -> Path:
    table = pa.table({"image": [{"bytes": image, "path": None} for image in images], "label": labels})
    if names:
        described = {"info": {"features": {"label": {"names": names, "_type": "ClassLabel"}}}}
        table = table.replace_schema_metadata({"huggingface": json.dumps(described)})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)
    return path


def test_parquet_images_come_out_to_the_pixel_with_their_class_names(tmp_path, opened):
    pixels = colours(8)
    write_table(tmp_path / "data/train.parquet", [encoded(p) for p in pixels], [0, 1] * 4, names=["cat", "dog"])
    data = opened("parquet")
    assert np.array_equal(data.inputs, np.stack(pixels).transpose(0, 3, 1, 2))
    assert (data.labels.tolist(), data.class_names, data.scale) == ([0, 1] * 4, ["cat", "dog"], 255.0)


@pytest.mark.parametrize("form", ["PNG", "TIFF"])
def test_grey_images_have_one_channel(tmp_path, opened, form):
    pixels = [p[..., 0] for p in colours(4)]
    write_table(tmp_path / "data/train.parquet", [encoded(p, form) for p in pixels], [0, 1, 2, 0])
    data = opened("parquet")
    assert np.array_equal(data.inputs, np.stack(pixels)[:, None])
    assert data.class_names == ["0", "1", "2"]


def test_grey_images_encoded_in_colour_have_one_channel_unless_one_of_them_is_coloured(tmp_path, opened):
    grey = [np.repeat(p[..., :1], 3, axis=2) for p in colours(4)]
    path = write_table(tmp_path / "data/train.parquet", [encoded(p) for p in grey], [0, 1, 0, 1])
    assert np.array_equal(opened("parquet").inputs[:, 0], [p[..., 0] for p in grey])
    write_table(path, [encoded(p) for p in [*grey[:3], colours(1)[0]]], [0, 1, 0, 1])
    assert opened("parquet").input_shape == (3, 6, 5)


def test_images_may_be_plain_binary_values_under_names_of_ones_own(tmp_path, opened):
    (tmp_path / "data").mkdir()
    table = pa.table({"picture": [encoded(p) for p in colours(4)], "kind": pa.array([0, 1, 1, 0], pa.uint8())})
    pq.write_table(table, tmp_path / "data/all.parquet")
    assert opened("parquet", image="picture", label="kind").labels.tolist() == [0, 1, 1, 0]


def test_files_named_test_are_the_published_test_split_and_latest_is_not(tmp_path, opened):
    names = ("latest", "plain/test/part-0", "validation-00000-of-00001", "valid-00000-of-00001", "plain/val/0000")
    for seed, name in enumerate(names):
        write_table(tmp_path / f"data/{name}.parquet", [encoded(p) for p in colours(4, seed)], [0, 1, 0, 1])
    data = opened("parquet")
    assert data.sizes("train").sum() == 4
    assert data.sizes("test").sum() == 16


def test_more_images_than_a_block_keep_their_order(tmp_path, opened):
    pixels = np.arange(2500, dtype=np.uint16).view(np.uint8).reshape(2500, 1, 2)
    write_table(tmp_path / "data/train.parquet", [encoded(p) for p in pixels], [0, 1] * 1250)
    assert np.array_equal(opened("parquet").inputs[:, 0], pixels)


def test_a_constant_channel_does_not_divide_by_zero(tmp_path, opened):
    write_table(tmp_path / "data/train.parquet", [encoded(np.full((2, 2), 51, np.uint8))] * 4, [0, 1, 0, 1])
    data = opened("parquet")
    np.testing.assert_allclose((data.mean, data.std), ([0.2], [1.0]), rtol=1e-6)


def test_unpickling_finds_the_files_in_either_cache_or_says_where_they_belong(tmp_path, opened, monkeypatch):
    write_table(tmp_path / "data/train.parquet", [encoded(p) for p in colours(4)], [0, 1, 0, 1])
    data = opened("parquet")
    pickled = pickle.dumps(data)
    (tmp_path / "cache").rename(tmp_path / "elsewhere")

    with pytest.raises(PreparedDataMissing, match="does not have the prepared data") as missing:
        pickle.loads(pickled)

    for source, target in missing.value.files:
        receive_arrays(target, [(tmp_path / "elsewhere" / source.relative_to(tmp_path / "cache")).read_bytes()])
    assert pickle.loads(pickled).fingerprint == data.fingerprint

    monkeypatch.setenv("RAYPFL_CACHE", str(tmp_path / "elsewhere"))
    assert np.array_equal(pickle.loads(pickled).labels, [0, 1, 0, 1])


def test_a_file_that_arrives_damaged_is_refused(tmp_path, opened):
    write_table(tmp_path / "data/train.parquet", [encoded(p) for p in colours(4)], [0, 1, 0, 1])
    opened("parquet")
    (file,) = (tmp_path / "cache").rglob("samples.arrow")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1

    with pytest.raises(DataError, match="did not arrive as it was sent"):
        receive_arrays(tmp_path / "here/samples.arrow", [bytes(content)])
    assert not list((tmp_path / "here").iterdir())


GOOD = [encoded(p) for p in colours(3)]
WIDE = encoded(np.zeros((6, 5), np.uint16))


@pytest.mark.parametrize(
    ("images", "labels", "sentence"),
    [
        ([GOOD[0], GOOD[1], GOOD[2][:60]], [0, 1, 0], r"Row 3 of train\.parquet holds a damaged image"),
        ([GOOD[0], b"not an image", GOOD[2]], [0, 1, 0], r"Row 2 of train\.parquet holds a damaged image"),
        ([GOOD[0], None, GOOD[2]], [0, 1, 0], r"Row 2 of train\.parquet has no image bytes"),
        ([GOOD[0], encoded(colours(1)[0][:5]), GOOD[2]], [0, 1, 0], r"Row 2 .*3 x 5 x 5.* Row 1 .*3 x 6 x 5"),
        ([GOOD[0], GOOD[1], WIDE], [0, 1, 0], r"Row 3 of train\.parquet holds .* mode I;16; 8 bits"),
        (GOOD, [0, None, 1], r"Row 2 of train\.parquet has no 'label'"),
        (GOOD, [0, 1, -1], r"Row 3 of train\.parquet has label -1, but there are 2 classes"),
        (GOOD, [0, 1, 2], r"Row 3 of train\.parquet has label 2, but there are 2 classes"),
        (GOOD, ["cat", "dog", "cat"], r"Column 'label' of train\.parquet is of type string; it needs integers"),
        ([], pa.array([], pa.int64()), "has no samples"),
    ],
)
def test_a_bad_row_is_named(tmp_path, opened, images, labels, sentence):
    path = write_table(tmp_path / "data/train.parquet", GOOD, [0, 1, 0], names=["cat", "dog"])
    image_type = pq.read_schema(path).field("image").type
    column = pa.array([{"bytes": image, "path": None} for image in images], image_type)
    table = pa.table({"image": column, "label": labels}).replace_schema_metadata(pq.read_schema(path).metadata)
    pq.write_table(table, path)
    with pytest.raises(DataError, match=sentence):
        opened("parquet")


def test_a_missing_column_is_refused_with_the_columns_that_there_are(tmp_path, opened):
    write_table(tmp_path / "data/train.parquet", GOOD, [0, 1, 0])
    with pytest.raises(
        ConfigError,
        match=r"train\.parquet has no column 'labels', which data.label names \(did you mean 'label'\?\); its columns",
    ):
        opened("parquet", label="labels")


def test_a_column_that_holds_no_images_is_refused(tmp_path, opened):
    write_table(tmp_path / "data/train.parquet", GOOD, [0, 1, 0])
    with pytest.raises(DataError, match=r"Column 'label' of train\.parquet is of type int64, not encoded images"):
        opened("parquet", image="label")


def test_a_folder_that_is_missing_or_empty_is_refused_with_a_sentence(tmp_path, opened):
    with pytest.raises(ConfigError, match=r"data\.root is missing"):
        load_federated(DataConfig(name="parquet"), SMALL, seed=0, cache=tmp_path)
    with pytest.raises(ConfigError, match="which does not exist"):
        opened("parquet")
    (tmp_path / "data").mkdir()
    for name in ("parquet", "csv"):
        with pytest.raises(DataError, match=rf"There is no \*\.{name} in the folder .*data, which data.root names"):
            opened(name)


def test_a_file_that_is_not_parquet_is_named(tmp_path, opened):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/train.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(DataError, match=r"train\.parquet is not a readable Parquet file"):
        opened("parquet")


# --- a user's reader --------------------------------------------------------------------------------------------------


def stripes(config: DataConfig) -> RawData:
    """Four samples in two blocks."""
    blocks = (np.full((2, 1, 2, 2), value, np.uint8) for value in (0, 9))
    return RawData(blocks, np.array([0, 0, 1, 1]), ["dark", "bright"], scale=9.0)


def test_a_users_reader_is_named_by_its_module(tmp_path):
    data = load_federated(DataConfig(name=f"{__name__}:stripes"), SMALL, seed=0, cache=tmp_path)
    assert data.inputs[:, 0, 0, 0].tolist() == [0, 0, 9, 9]
    assert data.scale == 9.0


@pytest.mark.parametrize(
    ("inputs", "labels", "sentence"),
    [
        (np.zeros((3, 1, 2, 2), np.uint8), [0, 1, 5], "Sample 2 has label 5, but there are 2 classes"),
        (np.zeros((1, 1, 2, 2), np.uint8), np.int8([[0, 3]]), "label 3, but where a sample has several labels, each"),
        (np.zeros((2, 1, 2, 2), np.uint8), [0, 1, 1], "There are 2 inputs, but 3 labels"),
        (np.zeros((3, 2, 2), np.uint8), [0, 1, 1], r"inputs as uint8\[3, 2, 2\], not as uint8\[n, C, H, W\]"),
        (np.zeros((3, 1, 2, 2), np.float16), [0, 1, 1], "inputs as float16"),
    ],
)
def test_a_reader_whose_parts_do_not_fit_is_refused(tmp_path, monkeypatch, inputs, labels, sentence):
    monkeypatch.setattr(unfitting, "parts", (inputs, np.array(labels), ["a", "b"]), raising=False)
    with pytest.raises(DataError, match=sentence):
        load_federated(DataConfig(name=f"{__name__}:unfitting"), SMALL, seed=0, cache=tmp_path)


def unfitting(config: DataConfig) -> RawData:
    """A reader of the parts that a test has set."""
    return RawData(*unfitting.parts)


# --- Addresses --------------------------------------------------------------------------------------------------------


def test_a_folder_at_an_address_is_copied_once_and_again_when_a_file_changes(tmp_path, opened):
    path = write_table(tmp_path / "data/train.parquet", [encoded(p) for p in colours(4)], [0, 1, 0, 1])
    local = opened("parquet")
    address = f"file://{tmp_path}/data"
    assert opened("parquet", root=address).fingerprint == local.fingerprint

    (copy,) = (tmp_path / "cache/copies").iterdir()
    before = copy.stat().st_mtime_ns
    opened("parquet", root=address)

    assert [copied_file.stat().st_mtime_ns for copied_file in (tmp_path / "cache/copies").iterdir()] == [before]

    write_table(path, [encoded(p) for p in colours(4, seed=1)], [0, 1, 0, 1])
    assert opened("parquet", root=address).fingerprint == opened("parquet").fingerprint != local.fingerprint


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"root": "file:///there/is/none"}, "data.root is 'file:///there/is/none', which cannot be read"),
        ({"root": "what://bucket/folder"}, "data.root is 'what://bucket/folder', which cannot be read"),
        ({"root": "s3://bucket/mnist", "download": True}, "a download needs a folder of this machine"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused_in_a_sentence(opened, options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        opened("parquet", **options)


PIXELS = np.arange(12 * 4, dtype=np.uint8).reshape(12, 1, 2, 2)
PARITY = np.arange(12) % 2
NAMES = ["even", "odd"]
FORMS = {
    "tensors": (torch.from_numpy(PIXELS), torch.from_numpy(PARITY)),
    "lists of samples": ([torch.from_numpy(image) for image in PIXELS], PARITY.tolist()),
    "blocks of tensors": (iter(torch.from_numpy(PIXELS).split(5)), torch.from_numpy(PARITY).int()),
    "names of classes": (PIXELS, [NAMES[label] for label in PARITY]),
    "an array of names": (PIXELS, np.array(NAMES)[PARITY]),
}


@pytest.mark.parametrize("form", FORMS)
def test_tensors_lists_and_names_of_classes_are_read_as_arrays(form: str):
    inputs, labels = FORMS[form]
    raw = RawData(inputs, labels, NAMES)
    assert np.array_equal(np.concatenate(list(raw.blocks())), PIXELS)
    assert isinstance(raw.labels, np.ndarray) and np.array_equal(raw.labels, PARITY) and raw.kind == "classes"


def test_a_tensor_with_a_gradient_in_half_precision_is_read_as_float32():
    raw = RawData(torch.ones(12, 4, dtype=torch.bfloat16, requires_grad=True), PARITY, NAMES)
    assert raw.inputs.dtype == np.float32 and raw.inputs.shape == (12, 4)


@pytest.mark.parametrize(
    ("inputs", "labels", "sentence"),
    [
        (PIXELS, ["evn"] * 12, "Sample 0 has label 'evn', which is not in class_names; did you mean 'even'?"),
        (PIXELS, np.zeros((12, 2, 2), np.int64), r"int64\[12, 2, 2\]; .* One class a pixel.* is not supported"),
        (PIXELS, PARITY[:, None], r"int64\[12, 1\]; one class a sample is \[N\]: give labels\[:, 0\]"),
        (PIXELS[:5], PARITY, "There are 5 inputs, but 12 labels"),
        ([torch.zeros(n) for n in range(12)], PARITY, "The inputs are of different shapes"),
    ],
)
def test_data_that_cannot_be_taken_are_refused_in_a_sentence(inputs, labels, sentence: str):
    with pytest.raises(DataError, match=sentence.replace("?", r"\?")):
        RawData(inputs, labels, NAMES)


def of_one_class(config: DataConfig) -> RawData:
    return RawData(np.zeros((80, 3), np.float32), np.ones(80, np.int64), ["a", "b"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "spiral", "test_fraction": 0.4}, "data.test_fraction is 0.4, but has no effect.* data.split=merged"),
        ({"name": "digits", "rare": 5}, "data.rare is 5, but has no effect"),
        ({"name": "spiral", "test_fraction": 0.4, "split": "merged"}, ""),
        ({"name": f"{__name__}:of_one_class"}, "All samples of '.*:of_one_class' have the class 'b': there is nothing"),
    ],
)
def test_what_makes_no_sense_with_these_samples_is_warned_of(tmp_path: Path, options: dict, message: str):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_federated(DataConfig(**options), SMALL, seed=0, cache=tmp_path)
    texts = [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]
    assert len(texts) == bool(message) and all(re.search(message, text) for text in texts)


@pytest.mark.parametrize(
    ("shape", "labels", "sentence"),
    [
        ((3, 9, 9, 1), [0, 1, 0], r"taken for images of 9 channels\. If they are"),
        ((3, 4), np.eye(3, dtype=np.float32), r"give labels\.argmax\(1\)"),
    ],
    ids=["channels", "one-hot"],
)
def test_a_warning_of_samples_points_at_the_line_that_gives_them(shape, labels, sentence):
    with pytest.warns(UserWarning, match=sentence) as caught:
        RawData(np.zeros(shape, np.float32), labels, ["a", "b", "c"])
    assert [warning.filename for warning in caught] == [__file__]
