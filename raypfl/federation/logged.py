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
"""The beginning of the file names of a method's own tables."""

_NAME = re.compile(r"\w[\w.-]*", re.ASCII)
_KINDS = {"i": "int64", "u": "int64", "b": "int64", "f": "float64", "U": "text"}
_GAP = 1  # pixels between images in a grid


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
    """What a method or an analysis logs with in a round.

    Parameters
    ----------
    known : the columns and their kinds of each table that was logged in earlier rounds.
    """

    def __init__(self, known: Mapping[str, Mapping[str, str]]):
        self._logged = Logged()
        self._known = known

    @property
    def logged(self) -> Logged:
        """What was logged so far."""
        return self._logged

    def log(self, **values: float | Tensor) -> None:
        """Log numbers of this round, such as ``log(distillation_loss=0.3)``.

        They are in ``result.logged``, the report and MLflow. Of one name, a round keeps the last value.
        """
        self._logged.values.update({name: number(name, value) for name, value in values.items()})

    def log_table(self, name: str, columns: Mapping[str, Any]) -> None:
        """Log a table of this round: column -> ``[n]`` numbers or texts, with the same columns in every round.

        ``result.analysis[name]`` has the rows of all rounds.
        """
        self._logged.tables[name] = checked_columns(name, columns, self._known.get(name))

    def log_image(self, name: str, images: Tensor) -> None:
        """Log images ``[n, C, H, W]`` of this round as one PNG file, in a grid.

        C is 1 or 3; values are uint8, or floats from 0 to 1. The files are in ``result.images``.
        """
        self._logged.images[name] = png(name, images)


def refuse_bad_name(name: str) -> None:
    """Raise a MethodError unless `name` can name a file and a metric."""
    if not _NAME.fullmatch(name):
        raise MethodError(f"{name!r} cannot be logged under this name; use letters, digits, and any of _ . - in it.")


def number(name: str, value: Any) -> float:
    """A value that is logged, as a float."""
    refuse_bad_name(name)
    array = _array(value)
    if array.size != 1 or array.dtype.kind not in "iubf":
        raise MethodError(
            f"cohort.log takes one number for {name!r}, not {_described(value, array)}; many of them are a table: "
            f"cohort.log_table({name!r}, {{'value': ...}})."
        )
    return float(array.reshape(()))


def checked_columns(name: str, given: Mapping[str, Any], known: Mapping[str, str] | None) -> dict[str, np.ndarray]:
    """The columns of a table that is logged, each ``[n]``; `known` are the kinds of its columns in earlier rounds."""
    refuse_bad_name(name)
    arrays = {str(column): _array(values) for column, values in given.items()}
    for column, array in arrays.items():
        if array.ndim != 1 or array.dtype.kind not in _KINDS or column == "round":
            raise MethodError(
                f"The column {column!r} of the table {name!r} is {_described(given[column], array)}; a column is one "
                "row of numbers or texts, under any name but 'round', which is there already."
            )
    if len({len(array) for array in arrays.values()}) != 1:
        lengths = {column: len(array) for column, array in arrays.items()}
        raise MethodError(
            f"The columns of the table {name!r} must be of one length, and at least one; they are {lengths}."
        )
    if known is not None:
        _refuse_other_columns(name, arrays, known)
    return {c: a.astype(float) if known and known[c] == "float64" else a for c, a in arrays.items()}


def kinds(table: Mapping[str, np.ndarray]) -> dict[str, str]:
    """The kinds of a table's columns, for :class:`raypfl.storage.columns.Columns`."""
    return {column: _KINDS[array.dtype.kind] for column, array in table.items()}


def png(name: str, images: Tensor) -> bytes:
    """Images ``[n, C, H, W]`` in a grid, as a PNG file: C is 1 or 3, uint8, or float between 0 and 1."""
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
    sink = io.BytesIO()
    Image.fromarray(grid[..., 0] if grid.shape[2] == 1 else grid).save(sink, "png")
    return sink.getvalue()


def _grid(images: np.ndarray) -> np.ndarray:
    """``uint8[n, C, H, W]`` side by side on white: ``[rows, columns, C]``."""
    count, channels, height, width = images.shape
    across = math.ceil(math.sqrt(count))
    down = -(-count // across)
    tiles = np.full((down * across, channels, height + _GAP, width + _GAP), 255, np.uint8)
    tiles[:count, :, :height, :width] = images
    rows = tiles.reshape(down, across, *tiles.shape[1:]).transpose(0, 3, 1, 4, 2)
    return rows.reshape(down * (height + _GAP), -1, channels)[:-_GAP, :-_GAP]


def _array(values: Any) -> np.ndarray:
    return unmarked(values).detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def _described(value: Any, array: np.ndarray) -> str:
    return f"a {type(value).__name__} of shape {list(array.shape)}"


def _refuse_other_columns(name: str, arrays: Mapping[str, np.ndarray], known: Mapping[str, str]) -> None:
    now = kinds(arrays)
    widened = {column: known[column] if kind == "int64" else kind for column, kind in now.items() if column in known}
    if widened != known or now.keys() != known.keys():
        raise MethodError(
            f"The table {name!r} had the columns {dict(known)} in earlier rounds and has {now} now; log it under "
            "another name."
        )
