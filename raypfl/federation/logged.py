"""What a method logs in a round: numbers, tables, images."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raypfl.common.errors import MethodError
from raypfl.common.messages import unmarked

LOGGED = {"round": "int32", "name": "text", "value": "float64"}
IMAGES = {"round": "int32", "name": "text", "png": "bytes"}
ANALYSIS = "analysis-"
"""The prefix of the file names of a method's own tables."""

EarlierKinds = Mapping[str, Mapping[str, str]]
"""Table -> column -> kind, of the tables that were logged in earlier rounds."""

_NAME = re.compile(r"\w[\w.-]*", re.ASCII)
_KINDS = {"i": "int64", "u": "int64", "b": "int64", "f": "float64", "U": "text"}
"""NumPy's kind of an array -> the kind of a column."""

_GAP = 1
"""Pixels between the images of a grid."""


@dataclass(frozen=True)
class Logged:
    """What a method logged in a round.

    Attributes
    ----------
    values : name -> number.
    tables : name -> column -> ``[n]``.
    images : name -> the bytes of a PNG file.
    """

    values: dict[str, float] = field(default_factory=dict)
    tables: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    images: dict[str, bytes] = field(default_factory=dict)


class Log:
    """Collects what a method or an analysis logs in a round."""

    def __init__(self, earlier_kinds: EarlierKinds):
        self._logged = Logged()
        self._earlier_kinds = earlier_kinds

    @property
    def logged(self) -> Logged:
        """What was logged so far."""
        return self._logged

    def log(self, **values: float | Tensor) -> None:
        """Log numbers of this round, such as ``log(distillation_loss=0.3)``.

        They are in ``result.logged``, the report and MLflow. If a name is logged twice in a round, the last value
        stays.
        """
        self._logged.values.update({name: as_number(name, value) for name, value in values.items()})

    def log_table(self, name: str, columns: Mapping[str, Any]) -> None:
        """Log a table of this round: column -> ``[n]`` numbers or texts, with the same columns in every round.

        ``result.analysis[name]`` has the rows of all rounds.
        """
        self._logged.tables[name] = checked_columns(name, columns, self._earlier_kinds.get(name))

    def log_image(self, name: str, images: Tensor) -> None:
        """Log images ``[n, C, H, W]`` of this round as one PNG file, in a grid.

        C is 1 or 3; values are uint8, or floats from 0 to 1. The files are in ``result.images``.
        """
        self._logged.images[name] = png(name, images)


def refuse_bad_name(name: str) -> None:
    """Raise a MethodError unless `name` can name a file and a metric."""
    if not _NAME.fullmatch(name):
        raise MethodError(f"{name!r} cannot be logged under this name; use letters, digits, and any of _ . - in it.")


def as_number(name: str, value: Any) -> float:
    """Return a logged value as a float."""
    refuse_bad_name(name)
    array = _array(value)
    if array.size != 1 or array.dtype.kind not in "iubf":
        raise MethodError(
            f"cohort.log takes one number for {name!r}, not {_described(value, array)}; many of them are a table: "
            f"cohort.log_table({name!r}, {{'value': ...}})."
        )
    return float(array.reshape(()))


def checked_columns(
    name: str, columns: Mapping[str, Any], earlier_kinds: Mapping[str, str] | None
) -> dict[str, np.ndarray]:
    """Return the columns of a logged table, each ``[n]``; they must fit those of earlier rounds."""
    refuse_bad_name(name)
    if not isinstance(columns, Mapping):
        raise MethodError(
            f"cohort.log_table takes columns by their names for {name!r}, as in {{'value': [1.5, 2.5]}}, not a "
            f"{type(columns).__name__}."
        )

    arrays = {str(column): _array(values) for column, values in columns.items()}
    for column, array in arrays.items():
        _refuse_large_integers(name, column, array)
        if array.ndim != 1 or array.dtype.kind not in _KINDS or column == "round":
            raise MethodError(
                f"The column {column!r} of the table {name!r} is {_described(columns[column], array)}; a column is one "
                "row of numbers or texts, under any name but 'round', which is there already."
            )

    lengths = {column: len(array) for column, array in arrays.items()}
    if len(set(lengths.values())) != 1:
        raise MethodError(
            f"The table {name!r} needs at least one column, and columns of one length; the lengths are {lengths}."
        )

    if earlier_kinds is None:
        return arrays
    _refuse_other_columns(name, arrays, earlier_kinds)
    for column, kind in earlier_kinds.items():
        if kind == "float64":  # a column of whole numbers in this round stays a column of floats
            arrays[column] = arrays[column].astype(float)
    return arrays


def kinds(table: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Return the kinds of a table's columns, for :class:`raypfl.storage.columns.Columns`."""
    return {column: _KINDS[array.dtype.kind] for column, array in table.items()}


def png(name: str, images: Tensor) -> bytes:
    """Return images ``[n, C, H, W]`` in a grid, as a PNG file: C is 1 or 3, uint8, or float between 0 and 1."""
    from PIL import Image

    refuse_bad_name(name)
    pixels = unmarked(images).detach().cpu()
    if pixels.dim() != 4 or pixels.shape[1] not in (1, 3) or not pixels.numel():
        raise MethodError(
            f"cohort.log_image takes images [n, C, H, W] with one channel or three for {name!r}, not "
            f"{list(pixels.shape)}."
        )
    if pixels.is_floating_point():
        pixels = (pixels.nan_to_num(0).clamp(0, 1) * 255).round()

    grid = _grid(pixels.to(torch.uint8).numpy())
    is_grey = grid.shape[2] == 1
    buffer = io.BytesIO()
    Image.fromarray(grid[..., 0] if is_grey else grid).save(buffer, "png")
    return buffer.getvalue()


def _grid(images: np.ndarray) -> np.ndarray:
    """Place images ``uint8[n, C, H, W]`` side by side on white: ``[height, width, C]``."""
    count, channels, height, width = images.shape
    num_columns = math.ceil(math.sqrt(count))
    num_rows = -(-count // num_columns)

    tiles = np.full((num_rows * num_columns, channels, height + _GAP, width + _GAP), 255, np.uint8)
    tiles[:count, :, :height, :width] = images
    # [rows, columns, C, h, w] -> [rows, h, columns, w, C]
    rows = tiles.reshape(num_rows, num_columns, *tiles.shape[1:]).transpose(0, 3, 1, 4, 2)
    return rows.reshape(num_rows * (height + _GAP), -1, channels)[:-_GAP, :-_GAP]


def _array(values: Any) -> np.ndarray:
    if isinstance(values, Tensor):
        tensor = unmarked(values).detach().cpu()
        # NumPy has no bfloat16.
        return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return np.asarray(values)


def _described(value: Any, array: np.ndarray) -> str:
    return f"a {type(value).__name__} of shape {list(array.shape)}"


def _refuse_large_integers(name: str, column: str, array: np.ndarray) -> None:
    """Raise a MethodError for whole numbers beyond 64 bits with a sign, which NumPy keeps unsigned or as objects."""
    if array.dtype.kind not in "uO":
        return
    large = [value for value in array.ravel().tolist() if isinstance(value, int) and not -(2**63) <= value < 2**63]
    if large:
        raise MethodError(
            f"The column {column!r} of the table {name!r} has {large[0]}, but whole numbers must be from -2^63 to "
            "2^63 - 1; log floats or texts."
        )


def _refuse_other_columns(name: str, arrays: Mapping[str, np.ndarray], earlier_kinds: Mapping[str, str]) -> None:
    new_kinds = kinds(arrays)
    # Whole numbers may follow floats in a column: `checked_columns` converts them.
    converted = {
        column: "float64" if kind == "int64" and earlier_kinds.get(column) == "float64" else kind
        for column, kind in new_kinds.items()
    }
    if converted != earlier_kinds:
        raise MethodError(
            f"The table {name!r} had the columns {dict(earlier_kinds)} in earlier rounds and has {new_kinds} now; log "
            "it under another name."
        )
