"""Places in files, as messages name them, and checks of labels that name the place of a wrong one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from raypfl.common.errors import DataError, listed
from raypfl.data.datasets.csv_lines import is_csv, line_of

_MAX_CLASSES = 100_000
"""Most classes that numbered labels may stand for, unless there are more samples."""

_FEW_NUMBERS = 20
"""Most different whole numbers that may be meant as classes."""


def place(row: int, file: str, path: Path | None = None) -> str:
    """Return what messages call a row, which is counted from 0 here.

    A CSV file has lines, of which the header is the first; a Parquet file has rows from 1; an array has indices from 0.

    Parameters
    ----------
    file : the file as messages name it.
    path : the file, which is read again if it is a CSV file; None: it has no blank lines and no lines within quotes.
    """
    if is_csv(file):
        return f"Line {row + 2 if path is None else line_of(path, row)} of {file}"
    if file.lower().endswith(".parquet"):
        return f"Row {row + 1} of {file}"
    return f"Index {row} of {file}"


def and_others(rows: Sequence[int] | np.ndarray, place_of: Callable[[int], str]) -> str:
    """Return what a message on the first of some rows adds about the others: ``" (also line 9 of ... and 4 more)"``.

    Parameters
    ----------
    place_of : a function that returns what messages call a row.
    """
    other_places = [place_of(int(row)) for row in rows[1:4]]
    if not other_places:
        return ""
    places = ", ".join(place[0].lower() + place[1:] for place in other_places)
    more = f" and {len(rows) - 4:,} more" if len(rows) > 4 else ""
    return f" (also {places}{more})"


def checked_labels(labels: np.ndarray, num_classes: int | None, file: str, first: int = 0) -> np.ndarray:
    """Check labels that a file counts from `first`, and return them counted from 0, as ``int64[n]``.

    Parameters
    ----------
    num_classes : number of classes; None: labels may be any integers.
    file : the file as messages name it.

    Raises
    ------
    DataError : naming the place of the first wrong label.
    """
    if labels.dtype.kind in "fO" and labels.ndim == 1:
        fractional = [row for row, label in enumerate(labels.tolist()) if not _is_whole(label)]
        if fractional:
            row = fractional[0]
            raise DataError(f"{place(row, file)} has label {labels[row]}, which is not an integer.")
    if labels.dtype.kind not in "iu" or labels.ndim != 1:
        raise DataError(
            f"The labels in {file} are {labels.dtype}{list(labels.shape)}; they must be integers [n], a class for each "
            "sample."
        )

    if num_classes is not None:
        outside = np.flatnonzero((labels < first) | (labels >= first + num_classes))
        if outside.size:
            raise DataError(
                f"{place(int(outside[0]), file)} has label {labels[outside[0]]}, but there are {num_classes} classes, "
                f"counted from {first}."
            )
    return labels.astype(np.int64) - first


def class_count(files: Sequence[tuple[str, np.ndarray]]) -> int:
    """Return the number of classes that the labels of all files, ``int[n]`` each, stand for, counted from 0.

    Raises
    ------
    DataError : if a label is negative, or too large to be the number of a class.
    """
    limit = max(_MAX_CLASSES, sum(len(labels) for _, labels in files))
    num_classes = 0
    for file, labels in files:
        wrong = np.flatnonzero((labels < 0) | (labels >= limit))
        if wrong.size:
            raise DataError(
                f"{place(int(wrong[0]), file)} has label {labels[wrong[0]]}, but labels must be numbers of classes, "
                f"from 0 and below {limit:,}; leave out samples without a label."
            )
        if len(labels):
            num_classes = max(num_classes, int(labels.max()) + 1)

    used = np.unique(np.concatenate([labels for _, labels in files]))
    if num_classes and used[0] > 0:
        warnings.warn(
            f"No sample has label 0, but labels count classes from 0: the network gets {num_classes} outputs, one for "
            f"a class without samples. If the labels of {files[0][0]} count from 1, subtract 1.",
            stacklevel=2,
        )
    elif 2 * len(used) < num_classes:
        warnings.warn(
            f"Labels count classes from 0 to {num_classes - 1}, but those of {files[0][0]} have only {len(used)} "
            f"different values: the network gets {num_classes} outputs. np.unique(labels, return_inverse=True)[1] "
            "counts these classes without gaps.",
            stacklevel=2,
        )
    return num_classes


def warn_of_classes(numbers: np.ndarray, name: str, remedy: str) -> None:
    """Warn of numbers to predict that seem to be classes: few different whole ones.

    Parameters
    ----------
    name : what messages call the numbers.
    remedy : what to do if they are classes.
    """
    values = np.unique(numbers)
    if len(values) <= _FEW_NUMBERS and not (values % 1).any():
        warnings.warn(
            f"{name} has only the numbers {listed(values.tolist())}. They are predicted as numbers, since they have "
            f"decimal points. If they are classes, {remedy}.",
            stacklevel=2,
        )


def require_equal_lengths(images: int, images_file: object, labels: int, labels_file: object) -> None:
    """Refuse a file of images and one of labels that have different lengths.

    Raises
    ------
    DataError : naming both, and the first index of the longer that the shorter does not have.
    """
    if images == labels:
        return

    if labels < images:
        lacking = "label"
        shorter_file = labels_file
    else:
        lacking = "image"
        shorter_file = images_file
    raise DataError(
        f"{images_file} holds {images} images, but {labels_file} {labels} labels: index {min(images, labels)} has no "
        f"{lacking}. Get {shorter_file} again, or write it again if it is yours."
    )


def _is_whole(label: object) -> bool:
    return isinstance(label, int) or (isinstance(label, float) and label.is_integer())
