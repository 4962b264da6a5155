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
    """``uint8[shape]`` of noise."""
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def png(image: np.ndarray) -> bytes:
    """An image ``uint8[H, W]`` or ``uint8[H, W, 3]``, encoded without loss."""
    stream = io.BytesIO()
    Image.fromarray(image).save(stream, "PNG")
    return stream.getvalue()


def pickled(path: Path, content: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(content, protocol=2))
    return path


def cifar10(root: Path, each: int = 4) -> np.ndarray:
    """Five batches to train on and one to test on, of `each` images; returns all images ``uint8[6 * each, 3072]``."""
    images = pixels(6 * each, 3072)
    for number, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        rows = slice(number * each, (number + 1) * each)
        content = {"batch_label": name, "data": images[rows], "labels": [i % 10 for i in range(each)]}
        pickled(root / "cifar-10-batches-py" / name, content)
    pickled(root / "cifar-10-batches-py" / "batches.meta", {"label_names": CIFAR10_CLASSES})
    return images


def cifar100(root: Path, train: int = 40, test: int = 20) -> None:
    fine, coarse = [f"fine{i}" for i in range(100)], [f"coarse{i}" for i in range(20)]
    for name, count in (("train", train), ("test", test)):
        labels = {"fine_labels": [i % 100 for i in range(count)], "coarse_labels": [i % 20 for i in range(count)]}
        pickled(root / "cifar-100-python" / name, {"data": pixels(count, 3072, seed=count), **labels})
    pickled(root / "cifar-100-python" / "meta", {"fine_label_names": fine, "coarse_label_names": coarse})


def idx(path: Path, array: np.ndarray) -> Path:
    """An array of bytes as an IDX file, packed if its name says so."""
    content = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def mnist(folder: Path, train: str = "train", test: str = "t10k", packed: bool = False, labels: int = 10) -> np.ndarray:
    """20 images to train on and 10 to test on; returns all of them ``uint8[30, 28, 28]``."""
    images, suffix = pixels(30, 28, 28), ".gz" if packed else ""
    first = 1 if labels == 26 else 0
    classes = np.arange(30) % labels + first
    for part, rows in ((train, slice(0, 20)), (test, slice(20, 30))):
        idx(folder / "raw" / f"{part}-images-idx3-ubyte{suffix}", images[rows])
        idx(folder / "raw" / f"{part}-labels-idx1-ubyte{suffix}", classes[rows])
    return images


def image(path: Path, content: np.ndarray) -> Path:
    """An image file of the kind that its name says; of JPEG, the best there is, which is off by a few levels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(content).save(path, **({"quality": 100, "subsampling": 0} if path.suffix == ".JPEG" else {}))
    return path


def tiny_imagenet(root: Path) -> Path:
    """Two classes, with 3 images each to train on and 2 to validate, as the archive unpacks."""
    root.mkdir(parents=True, exist_ok=True)
    wnids = ["n02124075", "n01443537"]
    (root / "wnids.txt").write_text("\n".join(wnids) + "\n")
    (root / "words.txt").write_text("n01443537\tgoldfish, Carassius auratus\nn02124075\tEgyptian cat\n")
    for wnid in wnids:
        for i in range(3):
            image(root / "train" / wnid / "images" / f"{wnid}_{i}.JPEG", pixels(8, 8, 3, seed=i))
        (root / "train" / wnid / f"{wnid}_boxes.txt").write_text("")
    lines = [f"val_{i}.JPEG\t{wnids[i % 2]}\t0\t0\t7\t7" for i in range(4)]
    (root / "val").mkdir()
    (root / "val" / "val_annotations.txt").write_text("\n".join(lines) + "\n")
    for i in range(4):
        image(root / "val" / "images" / f"val_{i}.JPEG", pixels(8, 8, seed=i))  # grey among coloured ones, as there are
    image(root / "test" / "images" / "test_0.JPEG", pixels(8, 8, 3))
    return root


def cifar10_c(root: Path, each: int = 4, corruptions: tuple[str, ...] = ("fog", "snow")) -> Path:
    """`each` images in five severities."""
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
    """X-rays with these entries for Cardiomegaly, Edema, Consolidation, Atelectasis and Pleural Effusion."""
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
    """A file without its last bytes."""
    path.write_bytes(path.read_bytes()[:-by])
    return path


def leaf_images(labels: list[int]) -> list[list[float]]:
    """White pages of FEMNIST with as many dark pixels as the label says."""
    return [[0.2] * label + [1.0] * (784 - label) for label in labels]


def leaf(file: Path, writers: dict[str, list[int]] = WRITERS, **changes: Any) -> None:
    """A file of LEAF's FEMNIST, with the labels of each writer; or with other entries, `changes`."""
    data = {name: {"x": leaf_images(labels), "y": labels} for name, labels in writers.items()}
    content = {"users": list(writers), "num_samples": [len(y) for y in writers.values()], "user_data": data}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content | changes))
