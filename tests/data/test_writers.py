"""Data by writer: LEAF's FEMNIST and Shakespeare, and a table with a column of writers, as UniPen's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raypfl.common.errors import ConfigError, DataError
from raypfl.data.partitions.natural import ByColumn
from tests.support.datasets import WRITERS, encoded, leaf, leaf_images

Opened = Callable[..., Any]


def test_femnist_is_read_by_writer(tmp_path: Path, opened: Opened):
    leaf(tmp_path / "data/all_data_0.json")
    leaf(tmp_path / "data/all_data_1.json", {"f0003_00": [5, 6, 7, 8]})
    data = opened("femnist", ByColumn(), test_fraction=0.25)

    assert (data.num_clients, data.input_shape, data.num_classes) == (3, (1, 28, 28), 62)
    assert [data.class_names[label] for label in (0, 10, 36, 61)] == ["0", "A", "a", "z"]

    for client, expected in enumerate([[0, 10, 36, 61], [1, 1, 2], [5, 6, 7, 8]]):
        indices = np.r_[data.indices(client), data.indices(client, "test")]
        assert sorted(data.labels[indices].tolist()) == expected

    for pixels, label in zip(data.inputs, data.labels, strict=True):
        assert (pixels == 51).sum() == label and (pixels == 255).sum() == 784 - label


def test_leafs_train_and_test_folders_are_the_published_split(tmp_path: Path, opened: Opened):
    leaf(tmp_path / "data/train/all_data_0_train.json")
    leaf(tmp_path / "data/test/all_data_0_test.json", {name: [9] for name in WRITERS})
    leaf(tmp_path / "data/all_data/all_data_0.json")
    leaf(tmp_path / "data/sampled_data/part.json")
    data = opened("femnist", ByColumn())
    assert data.sizes("train").tolist() == [4, 3] and data.sizes("test").tolist() == [1, 1]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"users": None}, r"all_data_0.json has no 'users' and 'user_data'"),
        ({"users": []}, r"The \.json files in .* have no writer with samples"),
        ({"users": ["f0009_99"]}, r"lists the writer 'f0009_99', but has no x and y"),
        (
            {"user_data": {"f0001_41": {"x": [[0.5] * 783], "y": [1]}}},
            r"is \[1, 783\]; it must have rows of 784",
        ),
        ({"user_data": {"f0001_41": {"x": [[0.5], [0.5, 1]], "y": [1, 2]}}}, "rows of different lengths"),
        ({"user_data": {"f0001_41": {"x": [["a"] * 784], "y": [1]}}}, "other values than numbers"),
        (
            {"user_data": {"f0001_41": {"x": leaf_images([1, 2]), "y": [1]}}},
            r"has 2 images, but labels \[1\]: writer 'f0001",
        ),
        ({"user_data": {"f0001_41": {"x": [[255] * 784], "y": [1]}}}, r"Image 0 of .* has the value 255.0; LEAF's are"),
        ({"user_data": {"f0001_41": {"x": [[None] * 784], "y": [1]}}}, "value nan"),
        (
            {"user_data": {"f0001_41": {"x": leaf_images([1]), "y": [62]}}},
            "Image 0 of .* has label 62, but there are 62",
        ),
    ],
)
def test_a_damaged_file_of_leaf_is_refused_with_the_writer(
    tmp_path: Path, opened: Opened, changes: dict[str, Any], sentence: str
):
    leaf(tmp_path / "data/all_data_0.json", **changes)
    with pytest.raises(DataError, match=sentence):
        opened("femnist")


def test_files_of_leaf_that_are_cut_short_or_missing_are_refused(tmp_path: Path, opened: Opened):
    with pytest.raises(ConfigError, match=r"it should hold LEAF's \.json files"):
        opened("femnist")

    (tmp_path / "data").mkdir()
    with pytest.raises(DataError, match=r"There is no \.json file in .* preprocess\.sh"):
        opened("femnist")

    leaf(tmp_path / "data/all_data_0.json")
    file = tmp_path / "data/all_data_0.json"
    file.write_bytes(file.read_bytes()[:-50])

    with pytest.raises(DataError, match=r"all_data_0\.json is damaged, or not JSON"):
        opened("femnist")


def table(file: Path, labels: list[Any], writers: list[Any]) -> None:
    """Grey images in a column of structs, as UniPen's characters are published."""
    images = []
    for number in range(len(labels)):
        page = np.full((28, 28), number, np.uint8)
        images.append({"bytes": encoded(page), "path": None})

    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"image": images, "label": labels, "writer": writers}), file)


def test_characters_by_writer_are_read_from_a_table(tmp_path: Path, opened: Opened):
    table(tmp_path / "data/characters.parquet", [0, 61, 3, 3, 5], [7, 7, 9, 9, 9])
    data = opened("parquet", ByColumn(), group="writer", test_fraction=0.0)
    assert (data.num_clients, data.input_shape) == (2, (1, 28, 28))
    assert [sorted(data.labels[data.indices(c)].tolist()) for c in range(2)] == [[0, 61], [3, 3, 5]]


def test_a_table_without_writers_is_refused(tmp_path: Path, opened: Opened):
    table(tmp_path / "data/characters.parquet", [0, 1], [7, None])
    with pytest.raises(DataError, match=r"Row 2 of characters\.parquet has no 'writer'"):
        opened("parquet", ByColumn(), group="writer")
    with pytest.raises(ConfigError, match=r"characters\.parquet has no column 'author', which data\.group names"):
        opened("parquet", ByColumn(), group="author")


def windows(text: str, size: int = 5) -> dict[str, list[str]]:
    """A text as LEAF has it: a window for every character but the first ones, and the character itself."""
    return {"x": [text[i : i + size] for i in range(len(text) - size)], "y": list(text[size:])}


def plays(file: Path, **roles: dict[str, list[str]]) -> None:
    leaf(file, {}, users=list(roles), user_data=roles)


def test_shakespeare_is_read_by_role_as_the_texts_behind_leafs_windows(tmp_path: Path, opened: Opened):
    lines = {"ROMEO": "But, soft! what light", "JULIET": "O Romeo,\nRomeo!"}
    plays(tmp_path / "data/train/a.json", **{name: windows(text) for name, text in lines.items()})
    plays(tmp_path / "data/test/a.json", ROMEO=windows("It is the east,"), JULIET=windows("wherefore"))
    data = opened("shakespeare", ByColumn(), size=4)

    assert (data.num_clients, data.input_shape, data.num_classes) == (2, (4,), 80)

    for client, name in enumerate(sorted(lines)):
        x, y = data.take(np.sort(data.indices(client)))
        codes = [data.class_names.index(character) for character in lines[name]]
        assert x.ravel()[: len(codes) - 1].tolist() == codes[:-1] and y[y >= 0].tolist() == codes[1:]

    assert [int((data.labels[data.indices(c, "test")] >= 0).sum()) for c in range(2)] == [8, 14]


def test_windows_that_do_not_follow_each_other_are_separate_texts(tmp_path: Path, opened: Opened):
    first = windows("to be, or not")
    second = windows("that is the question")
    both = {key: first[key] + second[key] for key in ("x", "y")}
    plays(tmp_path / "data/all.json", HAMLET=both, OPHELIA=first)
    data = opened("shakespeare", ByColumn(), size=40, test_fraction=0.0)
    assert sorted((data.labels[data.indices(0)] >= 0).sum(1).tolist()) == [12, 19]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ({"x": ["to be"], "y": []}, r"x and y of role 'HAMLET' in all\.json are not as many texts"),
        ({"x": ["to be"], "y": [7]}, r"not as many texts"),
        ({"x": ["to bé"], "y": ["e"]}, r"text of role 'HAMLET' .* the character 'é', which is not one of LEAF's 80"),
    ],
)
def test_a_damaged_role_is_named(tmp_path: Path, opened: Opened, text: dict[str, Any], sentence: str):
    plays(tmp_path / "data/all.json", HAMLET=text)
    with pytest.raises(DataError, match=sentence):
        opened("shakespeare", ByColumn())


def test_a_text_file_is_a_writer_whose_characters_are_followed_by_the_next_ones(tmp_path: Path, opened: Opened):
    (tmp_path / "data").mkdir()
    # As Windows writes it: with a mark of UTF-8 at the beginning, and two characters at the end of a line.
    (tmp_path / "data/ann.txt").write_bytes(b"\xef\xbb\xbfab\r\nb")
    (tmp_path / "data/bob.txt").write_text("ba")
    data = opened("text", ByColumn(), size=2, test_fraction=0)
    assert data.class_names == ["\n", "a", "b"] and list(data.client_names) == ["ann.txt", "bob.txt"]
    assert data.inputs.tolist() == [[1, 2], [0, 0], [2, 0]]
    assert data.labels.tolist() == [[2, 0], [2, -1], [1, -1]]
