"""Small data sets in the forms in which their authors publish them."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

CIFAR10_CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
WRITERS = {"f0001_41": [0, 10, 36, 61], "f0002_07": [1, 1, 2]}


def pixels(*shape: int, seed: int = 0) -> np.ndarray:
    """Return noise ``uint8[shape]``."""
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def encoded(image: np.ndarray, form: str = "PNG") -> bytes:
    """Encode an image ``uint8[H, W]`` or ``uint8[H, W, 3]`` as the bytes of a file."""
    stream = io.BytesIO()
    Image.fromarray(image).save(stream, form)
    return stream.getvalue()


def pickled(path: Path, content: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(content, protocol=2))
    return path


def cifar10(root: Path, each: int = 4) -> np.ndarray:
    """Write five training batches and a test batch of `each` images; returns all images ``uint8[6 * each, 3072]``."""
    images = pixels(6 * each, 3072)
    labels = [i % 10 for i in range(each)]
    names = [f"data_batch_{number}" for number in range(1, 6)]

    for number, name in enumerate([*names, "test_batch"]):
        rows = slice(number * each, (number + 1) * each)
        content = {"batch_label": name, "data": images[rows], "labels": labels}
        pickled(root / "cifar-10-batches-py" / name, content)
    pickled(root / "cifar-10-batches-py" / "batches.meta", {"label_names": CIFAR10_CLASSES})
    return images


def cifar100(root: Path, train: int = 40, test: int = 20) -> None:
    """Write images whose pixels depend on their number alone, and the names of both kinds of labels."""
    for name, count in (("train", train), ("test", test)):
        content = {
            "data": pixels(count, 3072, seed=count),
            "fine_labels": [i % 100 for i in range(count)],
            "coarse_labels": [i % 20 for i in range(count)],
        }
        pickled(root / "cifar-100-python" / name, content)

    names = {
        "fine_label_names": [f"fine{i}" for i in range(100)],
        "coarse_label_names": [f"coarse{i}" for i in range(20)],
    }
    pickled(root / "cifar-100-python" / "meta", names)


def idx(path: Path, array: np.ndarray) -> Path:
    """Write bytes as an IDX file, compressed if its name ends in ``.gz``."""
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    content = header + array.astype(np.uint8).tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def mnist(folder: Path, train: str = "train", test: str = "t10k", packed: bool = False, labels: int = 10) -> np.ndarray:
    """Write 20 training images and 10 test images; returns all of them ``uint8[30, 28, 28]``."""
    images = pixels(30, 28, 28)
    suffix = ".gz" if packed else ""
    first_label = 1 if labels == 26 else 0  # EMNIST's letters are numbered from 1
    classes = np.arange(30) % labels + first_label

    for part, rows in ((train, slice(0, 20)), (test, slice(20, 30))):
        idx(folder / "raw" / f"{part}-images-idx3-ubyte{suffix}", images[rows])
        idx(folder / "raw" / f"{part}-labels-idx1-ubyte{suffix}", classes[rows])
    return images


def image(path: Path, content: np.ndarray) -> Path:
    """Write an image in the format of its file name; JPEG in its best quality, which is off by a few levels."""
    options = {"quality": 100, "subsampling": 0} if path.suffix == ".JPEG" else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(content).save(path, **options)
    return path


def tiny_imagenet(root: Path) -> Path:
    """Write two classes with 3 training and 2 validation images each, laid out as the archive unpacks."""
    root.mkdir(parents=True, exist_ok=True)
    wnids = ["n02124075", "n01443537"]
    (root / "wnids.txt").write_text("\n".join(wnids) + "\n")
    (root / "words.txt").write_text("n01443537\tgoldfish, Carassius auratus\nn02124075\tEgyptian cat\n")

    for wnid in wnids:
        for i in range(3):
            image(root / "train" / wnid / "images" / f"{wnid}_{i}.JPEG", pixels(8, 8, 3, seed=i))
        (root / "train" / wnid / f"{wnid}_boxes.txt").write_text("")

    annotations = [f"val_{i}.JPEG\t{wnids[i % 2]}\t0\t0\t7\t7" for i in range(4)]
    (root / "val").mkdir()
    (root / "val" / "val_annotations.txt").write_text("\n".join(annotations) + "\n")
    for i in range(4):
        # Grey: the published data set has some grey images among its coloured ones.
        image(root / "val" / "images" / f"val_{i}.JPEG", pixels(8, 8, seed=i))

    image(root / "test" / "images" / "test_0.JPEG", pixels(8, 8, 3))
    return root


def cifar10_c(root: Path, each: int = 4, corruptions: tuple[str, ...] = ("fog", "snow")) -> Path:
    """Write `each` images in five severities of each corruption."""
    root.mkdir(parents=True, exist_ok=True)
    for seed, corruption in enumerate(corruptions):
        np.save(root / f"{corruption}.npy", pixels(5 * each, 32, 32, 3, seed=seed))
    np.save(root / "labels.npy", np.tile(np.arange(each) % 10, 5))
    return root


CHEXPERT_COLUMNS = (
    "Path,Sex,Age,Frontal/Lateral,AP/PA,No Finding,Enlarged Cardiomediastinum,Cardiomegaly,Lung Opacity,Lung Lesion,"
    "Edema,Consolidation,Pneumonia,Atelectasis,Pneumothorax,Pleural Effusion,Pleural Other,Fracture,Support Devices"
)


def chexpert(root: Path, labels: list[tuple[str, str, str, str, str]]) -> Path:
    """Write X-rays with these entries for Cardiomegaly, Edema, Consolidation, Atelectasis and Pleural Effusion."""
    lines = [CHEXPERT_COLUMNS]

    for i, (cardiomegaly, edema, consolidation, atelectasis, effusion) in enumerate(labels):
        name = f"train/patient{i:05}/study1/view1_frontal.png"
        image(root / name, pixels(9 + i % 3, 8, seed=i))
        lines.append(
            f"CheXpert-v1.0-small/{name},Female,68,Frontal,AP,,,{cardiomegaly},,,{edema},{consolidation},,"
            f"{atelectasis},0.0,{effusion},,,1.0"
        )

    (root / "train.csv").write_text("\n".join(lines) + "\n")
    return root


def cut_short(path: Path, by: int = 100) -> Path:
    """Remove the last bytes of a file."""
    path.write_bytes(path.read_bytes()[:-by])
    return path


def leaf_images(labels: list[int]) -> list[list[float]]:
    """Return white pages of FEMNIST, each with as many dark pixels as its label says."""
    return [[0.2] * label + [1.0] * (784 - label) for label in labels]


def leaf(file: Path, writers: dict[str, list[int]] = WRITERS, **changes: Any) -> None:
    """Write a file of LEAF's FEMNIST, with the labels of each writer; `changes` replace its entries."""
    data = {name: {"x": leaf_images(labels), "y": labels} for name, labels in writers.items()}
    counts = [len(labels) for labels in writers.values()]
    content = {"users": list(writers), "num_samples": counts, "user_data": data}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content | changes))
