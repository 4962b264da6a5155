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
from tests.support.command import raypfl
from tests.support.runs import experiment


def run_of(folder: Path, **changes) -> Path:
    described = experiment(folder, rounds=2, data__unseen_fraction=0.25, evaluation__every=0, **changes)
    return library.run(described).run_dir


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_of(tmp_path_factory.mktemp("runs"), method="pefll")


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    drawn = np.random.default_rng(0)
    file = tmp_path / "samples.npz"
    np.savez(file, x=drawn.integers(0, 17, (12, 1, 8, 8), dtype=np.uint8), y=np.repeat([3, 7], 6))
    return file


def test_a_model_is_made_tested_and_written(run_dir: Path, samples: Path, tmp_path: Path):
    done = raypfl("personalize", str(run_dir), "--data", str(samples), "--out", str(tmp_path / "mine.safetensors"))
    assert done.exit_code == 0, done.output
    for part in ("pefll made a model from 9 samples in", "On 3 held-out samples: accuracy", "mine.safetensors"):
        assert part in done.stdout
    model = library.load_model(tmp_path / "mine.safetensors")
    assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


def test_its_numbers_are_there_for_programs(run_dir: Path, samples: Path, tmp_path: Path):
    words = ["--data", str(samples), "--out", str(tmp_path / "m.safetensors"), "--held-out", "0", "--json"]
    told = json.loads(raypfl("personalize", str(run_dir), *words).stdout)
    assert (told["samples"], told["held_out"], told["metrics"]) == (12, 0, {}) and told["seconds"] > 0


def test_images_in_folders_named_like_classes_are_scaled_to_the_runs_shape(tmp_path: Path):
    drawn = np.random.default_rng(0)
    for name in ("cat", "dog", "cow"):
        for client in ("train", "new"):
            folder = tmp_path / client / name
            folder.mkdir(parents=True)
            for number in range(12 if client == "train" else 4):
                pixels = drawn.integers(0, 256, (8, 8, 3), dtype=np.uint8)
                Image.fromarray(pixels).resize((8, 8) if client == "train" else (20, 20)).save(folder / f"{number}.png")
    run = run_of(
        tmp_path, method="fedavg-ft", data__name="image_folder", data__root=tmp_path / "train", partition="iid"
    )
    out = tmp_path / "m.safetensors"
    done = raypfl("personalize", str(run), "--data", str(tmp_path / "new"), "--out", str(out))
    assert done.exit_code == 0, done.output
    assert "from 9 samples" in done.stdout
    assert library.load_model(out)(torch.zeros(1, 3, 8, 8)).shape == (1, 3)
    shutil.copytree(tmp_path / "train", tmp_path / "others")
    (tmp_path / "others" / "cat").rename(tmp_path / "others" / "horse")
    done = raypfl("personalize", str(run), "--data", str(tmp_path / "others"), "--out", str(out))
    assert done.exit_code == 2 and "have other classes than the run: cow, dog, horse" in " ".join(done.stderr.split())


def test_a_mistake_is_a_sentence(run_dir: Path, samples: Path, tmp_path: Path):
    def told(data: Path, run: Path = run_dir) -> str:
        done = raypfl("personalize", str(run), "--data", str(data), "--out", str(tmp_path / "m.safetensors"))
        assert done.exit_code == 2 and "Traceback" not in done.output
        return " ".join(done.stderr.split())

    assert "There is no file or folder" in told(tmp_path / "nothing.npz")
    (tmp_path / "damaged.npz").write_bytes(b"PK\x03\x04 damaged")
    assert "cannot be read as a .npz file" in told(tmp_path / "damaged.npz")
    np.savez_compressed(tmp_path / "cut.npz", x=np.random.default_rng(0).random(999), y=np.zeros(999))
    whole = bytearray((tmp_path / "cut.npz").read_bytes())
    whole[100:140] = bytes(40)
    (tmp_path / "cut.npz").write_bytes(whole)
    assert "cannot be read as a .npz file" in told(tmp_path / "cut.npz")
    np.savez(tmp_path / "pickled.npz", x=np.array([{}], dtype=object), y=np.zeros(1))
    assert "cannot be read as a .npz file" in told(tmp_path / "pickled.npz")
    np.savez(tmp_path / "other.npz", images=np.zeros(1))
    assert "it needs arrays x and y" in told(tmp_path / "other.npz")
    (tmp_path / "notes.txt").write_text("hello")
    assert "neither a folder nor a .npz file" in told(tmp_path / "notes.txt")
    (tmp_path / "empty").mkdir()
    assert "'digits' is read from no folder" in told(tmp_path / "empty")
    assert "is not the folder of a run" in told(samples, tmp_path / "empty")
