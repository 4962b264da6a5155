"""Checks of labels while the file and the row that they come from are still known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from raypfl.common.errors import DataError

_MOST = 100_000
"""Classes that numbered labels may stand for, unless there are more samples."""


def checked_labels(labels: np.ndarray, num_classes: int | None, file: str, first: int = 0) -> np.ndarray:
    """Labels that the file counts from `first`, as ``int64[n]`` in ``range(num_classes)``; None: any integers.

    Raises
    ------
    DataError : naming the file and the first wrong row.
    """
    if labels.dtype.kind in "fO" and labels.ndim == 1:
        odd = [row for row, label in enumerate(labels.tolist()) if not _whole(label)]
        if odd:
            raise DataError(f"Row {odd[0]} of {file} has label {labels[odd[0]]}, which is not an integer.")
    if labels.dtype.kind not in "iu" or labels.ndim != 1:
        raise DataError(f"The labels in {file} are {labels.dtype}{list(labels.shape)}, not a list of integers.")
    outside = (labels < first) | (labels >= first + num_classes) if num_classes is not None else np.zeros(0)
    if (wrong := np.flatnonzero(outside)).size:
        raise DataError(
            f"Row {wrong[0]} of {file} has label {labels[wrong[0]]}, but there are {num_classes} classes, "
            f"counted from {first}."
        )
    return labels.astype(np.int64) - first


def class_count(files: Sequence[tuple[str, np.ndarray]]) -> int:
    """The number of classes that the labels ``int[n]`` of all files stand for, which count them from 0.

    Raises
    ------
    DataError : if a label is negative, or too large to be the number of a class.
    """
    most = max(_MOST, sum(len(labels) for _, labels in files))
    for file, labels in files:
        wrong = np.flatnonzero((labels < 0) | (labels >= most))
        if wrong.size:
            raise DataError(
                f"Row {wrong[0]} of {file} has label {labels[wrong[0]]}, but labels must be numbers of classes, from 0 "
                f"and below {most:,}; leave out samples without a label."
            )
    return max((int(labels.max()) for _, labels in files if len(labels)), default=-1) + 1


def require_equal_lengths(images: int, images_file: object, labels: int, labels_file: object) -> None:
    """Refuse a file of images and one of labels that have different lengths.

    Raises
    ------
    DataError : naming both, and the first row of the longer that the other does not have.
    """
    if images != labels:
        lacking, shorter = ("label", labels_file) if labels < images else ("image", images_file)
        raise DataError(
            f"{images_file} holds {images} images, but {labels_file} {labels} labels: row {min(images, labels)} has no "
            f"{lacking}. Get {shorter} again, or write it again if it is yours."
        )


def _whole(label: object) -> bool:
    return isinstance(label, int) or (isinstance(label, float) and label.is_integer())
