"""Samples of the jobs, prepared by raypfl and written to plain files for the other systems, client by client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

import raypfl
from benchmarks.noise import Noise
from raypfl.data import FederatedData, load_federated
from raypfl.data.datasets import DescribedData


def store(folder: Path) -> Path:
    """raypfl's cache in the folder of the samples."""
    return folder / "store"


def prepare(noise: Noise, folder: Path) -> tuple[dict[str, Any], Path]:
    """Put a data set into raypfl's store, and into files in `folder` that `order.Shards` reads.

    Returns
    -------
    ``data`` and ``partition`` of a raypfl experiment, and the folder of the files.
    """
    source = noise.source(store(folder))
    files = folder / noise.name
    if not (files / "about.json").exists():
        described = raypfl.Experiment(**source)
        write(load_federated(described.data, described.partition, seed=0), files)
    return source, files


def write(data: FederatedData | DescribedData, folder: Path) -> None:
    """Write all clients' samples, client after client, and ``about.json`` last."""
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        order = np.concatenate([data.indices(client, split) for client in range(data.num_clients)])
        inputs, labels = data.take(order)
        np.save(folder / f"{split}_inputs.npy", inputs)
        np.save(folder / f"{split}_labels.npy", labels)
        np.save(folder / f"{split}_offsets.npy", np.concatenate([[0], np.cumsum(data.sizes(split))]))
    about = {
        "input_shape": data.input_shape,
        "num_classes": data.num_classes,
        "scale": data.scale,
        "mean": data.mean.tolist(),
        "std": data.std.tolist(),
    }
    (folder / "about.json").write_text(json.dumps(about))
