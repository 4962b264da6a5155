"""Labels, checked where the file and the row that they come from are still known."""

from __future__ import annotations

import numpy as np

from raypfl.common.errors import DataError


def checked_labels(labels: np.ndarray, num_classes: int, place: str, first: int = 0) -> np.ndarray:
    """Labels, counted from `first` where they come from, as ``int64[n]`` in ``range(num_classes)``.

    Parameters
    ----------
    place : the file that they stand in.

    Raises
    ------
    DataError : naming the first row that is not.
    """
    if labels.dtype.kind in "fO" and labels.ndim == 1:
        odd = [row for row, label in enumerate(labels.tolist()) if not _whole(label)]
        if odd:
            raise DataError(f"Row {odd[0]} of {place} has label {labels[odd[0]]}, which is not an integer.")
    if labels.dtype.kind not in "iu" or labels.ndim != 1:
        raise DataError(f"The labels in {place} are {labels.dtype}{list(labels.shape)}, not a list of integers.")
    strange = np.flatnonzero((labels < first) | (labels >= first + num_classes))
    if strange.size:
        raise DataError(
            f"Row {strange[0]} of {place} has label {labels[strange[0]]}, but there are {num_classes} classes, "
            f"counted from {first}."
        )
    return labels.astype(np.int64) - first


def require_partners(images: int, images_file: object, labels: int, labels_file: object) -> None:
    """Refuse a file of images and one of labels that are not equally long.

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
