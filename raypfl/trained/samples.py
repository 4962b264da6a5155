"""The labelled samples of a new client, from files."""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from raypfl.common.errors import ConfigError, DataError, listed
from raypfl.data import FederatedData
from raypfl.data.datasets import DataSource, RawData
from raypfl.data.datasets.csv_lines import is_table
from raypfl.data.datasets.images import ImageReader
from raypfl.data.datasets.pools import UNLABELLED, read_pool
from raypfl.data.datasets.readers.tabular.table import Table
from raypfl.trained.models import TrainedModels
from raypfl.trained.new_rows import NewRows, inputs_of_rows


def samples_in(path: str | Path, models: TrainedModels) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and targets of a new client, in the shape and with the classes of the run's data.

    Parameters
    ----------
    path : a ``.npz`` file with arrays ``x`` and ``y``; a folder of images in a folder for each class, which has its
        name; a folder of files like those of the run's data set, which the same reader reads; or, where that is a
        table, one CSV or Parquet file.

    Raises
    ------
    ConfigError : if there is no such file, or it is of another kind.
    DataError : if it cannot be read, or does not fit.
    """
    file = Path(path).expanduser()
    reader = models.experiment.data.reader
    if isinstance(reader, Table) and (file.is_dir() or (file.is_file() and is_table(file.name))):
        return _rows_of_tables(file, reader, models)
    if file.is_dir():
        return _like_the_runs_data(file, models)
    if not file.is_file():
        raise ConfigError(f"There is no file or folder {file}; --data names the new client's samples.")
    if file.suffix != ".npz":
        raise ConfigError(f"{file} is neither a folder nor a .npz file with arrays x and y.")
    try:
        with np.load(file, allow_pickle=False) as arrays:
            names = set(arrays.files)
            if not {"x", "y"} <= names:
                raise DataError(f"{file} has {', '.join(sorted(names)) or 'no arrays'}; it needs arrays x and y.")
            return arrays["x"], arrays["y"]
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        raise DataError(f"{file} cannot be read as a .npz file: {error}") from error


def _rows_of_tables(path: Path, reader: Table, models: TrainedModels) -> tuple[np.ndarray, np.ndarray]:
    """Read the rows of a file, or of all files in a folder that the run's reader would read."""
    config = models.experiment.data
    files = [path] if path.is_file() else replace(reader, config=replace(config, root=str(path))).paths()
    tables = [NewRows.read(file) for file in files]
    inputs = [inputs_of_rows(rows, config, models.outline) for rows in tables]
    class_names = None if models.outline.kind == "numbers" else models.outline.class_names
    targets = [rows.targets(str(reader.target), class_names) for rows in tables]
    return np.concatenate(inputs), np.concatenate(targets)


def _like_the_runs_data(folder: Path, models: TrainedModels) -> tuple[np.ndarray, np.ndarray]:
    """Read a folder of images, or one that is like the run's data."""
    data = models.outline.data
    config = models.experiment.data
    if not isinstance(data, FederatedData):
        raise ConfigError(f"The data set {config.name!r} is generated; give a .npz file with arrays x and y.")

    example = RawData(
        inputs=data.inputs[:1],
        labels=data.labels[:1],
        class_names=data.class_names,
        scale=data.scale if data.inputs.dtype == np.uint8 else RawData.scale,  # only images have a scale
        feature_names=data.feature_names,
        indicators=data.indicators,
        vocabulary=data.vocabulary,
    )
    pool = read_pool(str(folder), _source(folder, config, data), example)

    targets = pool.labels.reshape(len(pool.labels), -1)
    unknown = np.isnan(targets) if data.kind == "numbers" else targets == UNLABELLED
    if unknown.all(axis=1).any():
        raise DataError(
            f"The samples in {folder} have other classes than the run: {', '.join(pool.raw.class_names[:5])}. Those of "
            f"the run are {', '.join(data.class_names[:5])}."
        )
    return np.concatenate(list(pool.blocks(data.input_shape))), pool.labels


def _source(folder: Path, config: DataSource, data: FederatedData) -> DataSource:
    """Return how a folder is read: as images if its folders are named like classes, else as the run's data are."""
    subfolders = {path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")}
    unknown = sorted(subfolders - set(data.class_names))
    if 0 < len(unknown) < len(subfolders):
        raise DataError(
            f"{folder} has folders for classes of the run, but also {listed(map(repr, unknown), 5)}, which the run "
            f"does not have; its classes are: {listed(data.class_names, 20)}. Rename or remove such folders."
        )
    if subfolders and not unknown:
        is_square = len(set(data.input_shape[-2:])) == 1
        size = data.input_shape[-1] if is_square else None
        image_options: dict[str, Any] = {"size": size}
        reader = config.reader
        if isinstance(reader, ImageReader):
            image_options["fit"] = reader.fit
        return DataSource(name="image_folder", root=str(folder), split="merged", options=image_options)

    if config.root is None:
        raise ConfigError(
            f"The folders in {folder} are not named like the run's classes ({', '.join(data.class_names[:5])}, ...), "
            f"and {config.name!r} is read from no folder. Name them so, or give a .npz file with arrays x and y."
        )
    return DataSource(name=config.name, root=str(folder), split="merged", options=config.options)
