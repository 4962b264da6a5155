"""`raypfl personalize` makes a model for a new client from the client's files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import raypfl as library
from raypfl.trained.samples import samples_in
from tests.support.command import raypfl
from tests.support.runs import experiment


def finished_run(folder: Path, **changes) -> Path:
    """The folder of a run of two rounds."""
    described = experiment(folder, rounds=2, data__unseen_fraction=0.25, evaluation__every=0, **changes)
    return library.run(described).run_dir


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished_run(tmp_path_factory.mktemp("runs"), method="pefll")


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    draws = np.random.default_rng(0)
    file = tmp_path / "samples.npz"
    np.savez(file, x=draws.integers(0, 17, (12, 1, 8, 8), dtype=np.uint8), y=np.repeat([3, 7], 6))
    return file


def test_a_model_is_made_tested_and_written(run_dir: Path, samples: Path, tmp_path: Path):
    result = raypfl("personalize", str(run_dir), "--data", str(samples), "--out", str(tmp_path / "mine.safetensors"))
    assert result.exit_code == 0, result.output
    for part in ("pefll made a model from 9 samples in", "On 3 held-out samples: accuracy", "mine.safetensors"):
        assert part in result.stdout

    model = library.load_model(tmp_path / "mine.safetensors")
    assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


def test_the_numbers_are_printed_as_json(run_dir: Path, samples: Path, tmp_path: Path):
    words = ["--data", str(samples), "--out", str(tmp_path / "m.safetensors"), "--held-out", "0", "--json"]
    numbers = json.loads(raypfl("personalize", str(run_dir), *words).stdout)
    assert (numbers["samples"], numbers["held_out"], numbers["metrics"]) == (12, 0, {}) and numbers["seconds"] > 0


def write_images(folder: Path, count: int, side: int, width: int | None = None) -> None:
    """Write noise in three classes, a folder each, as ``image_folder`` reads it; square unless there is a width."""
    draws = np.random.default_rng(0)
    for name in ("cat", "dog", "cow"):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = draws.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).resize((width or side, side)).save(folder / name / f"{number}.png")


def test_images_in_folders_named_like_classes_are_scaled_to_the_runs_shape(tmp_path: Path):
    write_images(tmp_path / "train", count=12, side=8)
    write_images(tmp_path / "new", count=4, side=20)
    data = {"data__name": "image_folder", "data__root": tmp_path / "train", "partition": "iid"}
    run = finished_run(tmp_path, method="fedavg-ft", **data)
    out = tmp_path / "m.safetensors"

    result = raypfl("personalize", str(run), "--data", str(tmp_path / "new"), "--out", str(out))
    assert result.exit_code == 0, result.output
    assert "from 9 samples" in result.stdout
    assert library.load_model(out)(torch.zeros(1, 3, 8, 8)).shape == (1, 3)

    shutil.copytree(tmp_path / "train", tmp_path / "renamed")
    for old, new, problem in [
        ("cat", "horse", "also 'horse', which the run does not have; its classes are: cat, cow, dog."),
        ("dog", "hen", "also 'hen', 'horse', which the run does not have"),
        ("cow", "pig", "have other classes than the run: hen, horse, pig"),
    ]:
        (tmp_path / "renamed" / old).rename(tmp_path / "renamed" / new)
        result = raypfl("personalize", str(run), "--data", str(tmp_path / "renamed"), "--out", str(out))
        assert result.exit_code == 2 and problem in " ".join(result.stderr.split())


def test_images_that_are_not_square_are_cropped_where_the_runs_are(tmp_path: Path):
    write_images(tmp_path / "train", count=12, side=8, width=16)
    data = {"data__name": "image_folder", "data__root": tmp_path / "train", "data__size": 6, "data__fit": "crop"}
    run = finished_run(tmp_path, method="fedavg-ft", partition="iid", **data)
    models = library.trained_models(run)

    inputs, _ = samples_in(tmp_path / "train", models)
    np.testing.assert_array_equal(inputs, models.outline.data.inputs)


def test_a_mistake_is_a_sentence(run_dir: Path, samples: Path, tmp_path: Path):
    def refusal(data: Path, run: Path = run_dir) -> str:
        result = raypfl("personalize", str(run), "--data", str(data), "--out", str(tmp_path / "m.safetensors"))
        assert result.exit_code == 2 and "Traceback" not in result.output
        return " ".join(result.stderr.split())

    assert "There is no file or folder" in refusal(tmp_path / "nothing.npz")

    (tmp_path / "damaged.npz").write_bytes(b"PK\x03\x04 damaged")
    assert "cannot be read as a .npz file" in refusal(tmp_path / "damaged.npz")

    # Damage inside an array: the archive opens, and decompressing fails.
    np.savez_compressed(tmp_path / "cut.npz", x=np.random.default_rng(0).random(999), y=np.zeros(999))
    content = bytearray((tmp_path / "cut.npz").read_bytes())
    content[100:140] = bytes(40)
    (tmp_path / "cut.npz").write_bytes(content)
    assert "cannot be read as a .npz file" in refusal(tmp_path / "cut.npz")

    np.savez(tmp_path / "pickled.npz", x=np.array([{}], dtype=object), y=np.zeros(1))
    assert "cannot be read as a .npz file" in refusal(tmp_path / "pickled.npz")
    np.savez(tmp_path / "other.npz", images=np.zeros(1))
    assert "it needs arrays x and y" in refusal(tmp_path / "other.npz")

    (tmp_path / "notes.txt").write_text("hello")
    assert "neither a folder nor a .npz file" in refusal(tmp_path / "notes.txt")
    (tmp_path / "empty").mkdir()
    assert "'digits' is read from no folder" in refusal(tmp_path / "empty")
    assert "is not the folder of a run" in refusal(samples, tmp_path / "empty")
