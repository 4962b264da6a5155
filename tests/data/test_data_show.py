"""The clients' data in numbers and as a picture."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from rich.console import Console
from typer.testing import CliRunner

from raypfl.cli.app import app
from raypfl.common.errors import ConfigError
from raypfl.data import Dirichlet, Summary, load_federated, summarised
from raypfl.data.datasets import DataConfig, Population
from raypfl.results import client_data


def summary(counts: list | np.ndarray, unseen: tuple[int, ...] = ()) -> Summary:
    counts = np.asarray(counts)
    names = [f"class {c}" for c in range(counts.shape[1])]
    sizes = {"train": counts.sum(axis=1), "val": 0 * counts.sum(axis=1), "test": counts.sum(axis=1) // 4}
    return Summary("made up", (1, 8, 8), names, sizes, counts, {"auxiliary": 1200}, np.array(unseen, dtype=np.int64))


def test_entropy_is_in_bits_and_distance_is_the_share_of_samples_to_be_moved():
    data = summary([[10, 0, 0, 0], [5, 5, 5, 5], [0, 10, 10, 10]])
    np.testing.assert_allclose(data.entropy, [0, 2, np.log2(3)])
    np.testing.assert_allclose(data.distance, [0.75, 0, 0.25])
    assert data.classes_held.tolist() == [1, 4, 3]


def test_an_unseen_client_with_classes_that_no_trained_client_has_together_is_named():
    data = summary([[5, 5, 0], [1, 9, 0], [0, 5, 5], [5, 0, 0], [3, 0, 3]], unseen=(1, 3, 4))
    assert data.unseen_with_new_classes.tolist() == [3, 4]

    console = Console(file=io.StringIO(), width=200)
    client_data.show(console, data)
    assert "No trained client has just the classes of these unseen clients: 3, 4." in console.file.getvalue()


def test_a_client_without_samples_has_no_mix():
    data = summary([[0, 0], [1, 1]])
    assert data.shares.tolist() == [[0, 0], [0.5, 0.5]]
    assert np.isfinite(data.entropy).all() and np.isfinite(data.distance).all()


def test_a_summary_counts_the_samples_of_the_data_set(tmp_path):
    data = load_federated(
        DataConfig(pools={"auxiliary": 0.1}, unseen_fraction=0.2), Dirichlet(clients=10), seed=0, cache=tmp_path
    )
    data_summary = summarised(data)
    assert np.array_equal(data_summary.counts, data.label_counts("train"))
    assert data_summary.pools == {"auxiliary": len(data.pool("auxiliary"))}
    assert len(data_summary.unseen) == 2


class OneClient(Population):
    """A population of a single client with one training sample."""

    num_clients = 1
    num_classes = 2
    input_shape = (1, 2, 2)

    def sizes(self, split):
        return np.array([1])

    def samples(self, client, split):
        return np.zeros((1, 1, 2, 2), np.uint8), np.zeros(1, np.int64)


def test_described_clients_have_no_summary():
    data = load_federated(DataConfig(name=f"{__name__}:OneClient"), Dirichlet(), seed=0)
    with pytest.raises(ConfigError, match="is a population, whose labels are known only when a client works"):
        summarised(data)


def test_the_table_tells_sizes_label_mixes_and_pools():
    console = Console(file=io.StringIO(), width=100)
    client_data.show(console, summary([[30, 0], [10, 10]], unseen=(1,)))
    table = console.file.getvalue()

    for part in (
        "made up: 62 samples of 1x8x8, 2 classes, 2 clients, 1 of them never trained",
        "pool auxiliary: 1,200 samples",
    ):
        assert part in table

    rows = {line.split("  ")[0].strip(): line.split()[-5:] for line in table.splitlines() if line.strip()}
    assert rows["train"] == ["20", "25", "25", "30", "50"]
    assert rows["earth mover's distance to all clients' mix"][1:] == ["0.20", "0.25", "0.25", "0.30"]


@pytest.mark.parametrize("clients", [1, 10, 50, 1000, 4000])
def test_a_picture_is_drawn_for_any_number_of_clients(tmp_path, clients):
    counts = np.random.default_rng(0).multinomial(50, np.random.default_rng(1).dirichlet(np.full(10, 0.3), clients))
    pixels = imread(client_data.draw(summary(counts), tmp_path / "data.png"))
    assert pixels.shape[0] > 700 and 500 < pixels.shape[1] <= 13 * 160
    assert (pixels[..., :3].min(axis=2) < 0.5).mean() > 0.005


def test_clients_of_one_class_are_drawn_as_a_diagonal():
    counts = 100 * np.eye(10, dtype=int)[np.random.default_rng(0).permutation(np.arange(100) % 10)]
    figure = Figure(figsize=(9, 5))
    client_data.paint(figure, summary(counts))
    (image,) = figure.axes[1].images
    assert (np.diff(np.asarray(image.get_array()).argmax(axis=0)) >= 0).all()


@pytest.mark.parametrize(
    ("largest", "steps"),
    [(1, "1"), (4, "2"), (9, "1 5"), (18, "2 10"), (137, "5 20 100"), (5000, "200 1,000 5,000")],
)
def test_the_legend_has_round_numbers_that_are_far_apart(largest, steps):
    figure = Figure(figsize=(9, 5))
    client_data.paint(figure, summary([[largest, 1], [1, 1]]))
    assert " ".join(text.get_text() for text in figure.axes[1].get_legend().get_texts()) == steps


def test_small_shares_of_many_classes_are_drawn_in_dark_shades(tmp_path):
    counts = np.ones((11, 99), dtype=int) + 7 * (np.arange(99) // 9 == np.arange(11)[:, None])  # 5 % at most
    pixels = imread(client_data.draw(summary(counts), tmp_path / "data.png"))[300:, :-300, :3]
    assert (pixels[..., 0] < 0.2).mean() > 0.03 and (pixels[..., 0] > 0.7).mean() > 0.5


@pytest.mark.parametrize("clients", [10, 200])
def test_clients_that_are_never_trained_are_grey_in_pictures_of_few_and_of_many_clients(tmp_path, clients):
    def grey_pixels(unseen: tuple[int, ...]) -> int:
        picture = imread(client_data.draw(summary(np.full((clients, 10), 5), unseen), tmp_path / "data.png"))
        return int((np.abs(picture[..., :3] - np.array([0xB9, 0xC3, 0xCE]) / 255).max(axis=2) < 0.01).sum())

    assert grey_pixels(()) == 0
    assert grey_pixels(tuple(range(clients // 2))) > 2000


def test_several_labels_a_sample_are_called_labels():
    console = Console(file=io.StringIO(), width=100)
    client_data.show(console, replace(summary([[30, 0], [10, 10]]), kind="labels"))
    assert "2 labels, 2 clients" in console.file.getvalue() and "labels held" in console.file.getvalue()


def test_the_command_shows_the_data_of_an_experiment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    changes = ["partition.clients=5", "data.pools.auxiliary=0.1", "--picture", "mine.png"]
    result = CliRunner().invoke(app, ["data", "show", "digits", *changes])

    assert result.exit_code == 0, result.output
    assert (
        "digits: 1,617 samples of 1x8x8, 10 classes, 5 clients" in result.output
        and "Picture: mine.png" in result.output
    )
    assert Path("mine.png").stat().st_size > 10_000

    numbers = json.loads(CliRunner().invoke(app, ["data", "show", *changes, "--json"]).stdout)
    assert numbers["clients"] == 5 and numbers["pools"] == {"auxiliary": 180}
    assert numbers["samples"]["train"]["total"] == 1215


def test_the_command_refuses_data_that_it_cannot_show_in_a_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["data", "show", "data=cifar10"])
    assert result.exit_code == 2
    assert "data.root is missing" in result.output
