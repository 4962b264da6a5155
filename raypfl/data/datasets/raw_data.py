"""What a reader returns: samples with their labels and names, and the checks that they fit together."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raypfl.common.errors import DataError, did_you_mean
from raypfl.learning.objectives import kind_of


@dataclass(frozen=True)
class RawData:
    """A data set as its reader returns it.

    Attributes
    ----------
    inputs : ``uint8[N, C, H, W]`` images, ``float32`` or ``float64[N, ...]`` features, or ``int64[N, ...]`` tokens; or
        an iterable of such blocks, in order, so that they need not all be in memory at once. A list of N samples
        without such an axis is stacked.
    labels : ``int64[N]``, each in ``range(len(class_names))``, or N of the class names; ``int8[N, L]`` of zeros and
        ones, L labels per sample; ``float32`` or ``float64[N]`` or ``[N, T]``, T numbers per sample; or ``int64[N, T]``
        tokens, -1 for none.
    class_names : a name for each class, label, number or token.
    scale : the value of a full pixel, by which images are divided.
    test_mask : ``bool[N]``, the samples of the published test split; None: there is none.
    groups : the domain, writer or the like of each sample, ``[N]`` of integers or text; None: there is no such column.
    feature_names : the names of the last axis of `inputs`; None: features have no names. Pools' features are matched
        by name.
    indicators : for each feature name, whether it is 1 or 0 for a category and so is not standardised; None: none is.
    vocabulary : the word of each token in `inputs`; None: inputs are no texts. Token 0 is padding, and token 1 a word
        that is not in the vocabulary. Pools' words are matched by name.

    NumPy arrays, PyTorch tensors and lists will do; the attributes are arrays.

    Raises
    ------
    DataError : if the parts do not fit together.
    """

    inputs: np.ndarray | Iterable[np.ndarray]
    labels: np.ndarray
    class_names: list[str]
    scale: float = 255.0
    test_mask: np.ndarray | None = None
    groups: np.ndarray | None = None
    feature_names: list[str] | None = None
    indicators: list[bool] | None = None
    vocabulary: list[str] | None = None

    def __post_init__(self) -> None:
        for name in ("labels", "test_mask", "groups"):
            column = getattr(self, name)
            if column is not None:
                object.__setattr__(self, name, as_array(column, name))
        object.__setattr__(self, "class_names", [str(name) for name in self.class_names])

        if not len(self.labels):
            raise DataError("The data set has no samples.")
        object.__setattr__(self, "labels", class_numbers(self.labels, self.class_names))
        if isinstance(self.inputs, Tensor) or _is_list_of_samples(self.inputs, len(self.labels)):
            object.__setattr__(self, "inputs", as_array(self.inputs, "inputs"))

        self._check_shapes()
        self._check_labels()
        self._check_class_names()
        self._check_columns()
        self._check_features()

    @property
    def kind(self) -> str:
        """The kind of the targets, one of :data:`raypfl.learning.objectives.KINDS`."""
        return kind_of(self.labels)

    def _check_shapes(self) -> None:
        if self.labels.dtype.kind not in "iuf" or self.labels.ndim > 2:
            raise DataError(
                f"The labels are {self.labels.dtype}{list(self.labels.shape)}; they must be integers [N], one class a "
                "sample; int8 [N, L], zeros and ones; floating-point numbers [N] or [N, T]; or tokens [N, T]. One "
                "class a pixel, as in segmentation, is not supported."
            )
        if self.labels.shape[1:] == (1,) and self.labels.dtype.kind in "iu" and self.labels.dtype != np.int8:
            raise DataError(
                f"The labels are {self.labels.dtype}{list(self.labels.shape)}; one class a sample is [N]: give "
                "labels[:, 0]."
            )

        # Inputs that come in blocks are checked as they are read.
        if not isinstance(self.inputs, np.ndarray):
            return
        if len(self.inputs) != len(self.labels):
            raise DataError(f"There are {len(self.inputs)} inputs, but {len(self.labels)} labels.")

        shape = self.inputs.shape
        if len(shape) == 4 and shape[1] == shape[2] > 4 and shape[3] in (1, 3):
            warnings.warn(
                f"The inputs are {list(shape)}, which are taken for images of {shape[1]} channels. If they are "
                "[N, H, W, C], give inputs.transpose(0, 3, 1, 2).",
                stacklevel=4,
            )

    def _check_labels(self) -> None:
        if self.kind == "numbers":
            self._warn_of_one_hot()
            is_wrong = ~np.isfinite(in_single_precision(self.labels))
            expected = "targets must be finite numbers in single precision"
        elif self.kind == "labels":
            is_wrong = (self.labels != 0) & (self.labels != 1)
            expected = "where a sample has several labels, each is 0 or 1"
        else:
            lowest = -1 if self.kind == "tokens" else 0
            is_wrong = (self.labels < lowest) | (self.labels >= len(self.class_names))
            expected = f"there are {len(self.class_names)} classes, counted from 0"

        wrong = np.argwhere(is_wrong)
        if wrong.size:
            raise DataError(f"Sample {wrong[0][0]} has label {self.labels[tuple(wrong[0])]}, but {expected}.")

    def _warn_of_one_hot(self) -> None:
        is_table = self.labels.ndim == 2 and self.labels.shape[1] > 1
        if is_table and ((self.labels == 0) | (self.labels == 1)).all() and (self.labels.sum(1) == 1).all():
            warnings.warn(
                "The labels are numbers, for regression, but each row has a single 1, as one class a sample has. For "
                "classification give labels.argmax(1).",
                stacklevel=5,
            )

    def _check_class_names(self) -> None:
        if self.kind not in ("labels", "numbers"):
            return
        width = self.labels[0].size
        if width == len(self.class_names):
            return

        if self.labels.ndim == 1:
            raise DataError(
                f"Labels of type {self.labels.dtype} are numbers for regression, one a sample, but there are "
                f"{len(self.class_names)} names; the labels of classes must be integers."
            )
        raise DataError(f"Samples have {width} {self.kind}, but there are {len(self.class_names)} names.")

    def _check_columns(self) -> None:
        for name, column in (("marks of the test split", self.test_mask), ("groups", self.groups)):
            if column is not None and column.shape != self.labels.shape[:1]:
                raise DataError(f"There are {len(self.labels)} labels, but {name} of shape {list(column.shape)}.")

    def _check_features(self) -> None:
        names = self.feature_names or []
        if self.indicators is not None and len(self.indicators) != len(names):
            raise DataError(f"There are {len(names)} names of features, but {len(self.indicators)} indicators.")
        if names and isinstance(self.inputs, np.ndarray) and self.inputs.shape[-1] != len(names):
            raise DataError(f"There are {len(names)} names of features, but inputs are [N, {self.inputs.shape[-1]}].")
        if isinstance(self.inputs, np.ndarray):
            refuse_unknown_tokens(self.inputs, self.vocabulary, "the inputs")

    def blocks(self) -> Iterable[np.ndarray]:
        """Return the inputs, block by block: ``[n, ...]`` each."""
        if isinstance(self.inputs, np.ndarray):
            return [self.inputs]
        return (as_array(block, "inputs") for block in self.inputs)


def in_single_precision(numbers: np.ndarray) -> np.ndarray:
    """Return numbers as float32, infinite where they are too large for it."""
    with np.errstate(over="ignore"):
        return numbers.astype(np.float32, copy=False)


def as_array(values: Any, name: str) -> np.ndarray:
    """Convert a PyTorch tensor, a list, or a list of tensors to an array; `name` is what messages call the values.

    Raises
    ------
    DataError : if rows are of different shapes.
    """
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        # NumPy has no bfloat16, and the store no float16.
        return values.float().numpy() if values.dtype in (torch.bfloat16, torch.float16) else values.numpy()
    if isinstance(values, list | tuple) and any(isinstance(row, Tensor) for row in values):
        values = [as_array(row, name) for row in values]

    try:
        return np.asarray(values)
    except ValueError:
        raise DataError(f"The {name} are of different shapes, so they cannot form an array.") from None


def refuse_unknown_tokens(tokens: np.ndarray, vocabulary: list[str] | None, name: str) -> None:
    """Raise a DataError for the first token that a vocabulary lacks, if there is one.

    A network need not fail at such a token: to one that indexes a plain tensor, -1 is the last word.

    Parameters
    ----------
    name : what the message calls the tokens.
    """
    if vocabulary is None:
        return
    is_unknown = (tokens < 0) | (tokens >= len(vocabulary))
    if is_unknown.any():
        position = np.argwhere(is_unknown)[0]
        raise DataError(
            f"Sample {position[0]} of {name} has the token {tokens[tuple(position)]}, but the vocabulary has "
            f"{len(vocabulary)} tokens, counted from 0."
        )


def class_numbers(labels: np.ndarray, class_names: list[str]) -> np.ndarray:
    """Return the number of each label's class, ``int64[N]``, for labels ``[N]`` given as names; others unchanged.

    Raises
    ------
    DataError : for the first label that is not in `class_names`.
    """
    if labels.dtype.kind not in "UO" or labels.ndim != 1:
        return labels

    number_of = {name: number for number, name in enumerate(class_names)}
    for row, label in enumerate(labels.tolist()):
        if not (isinstance(label, str) and label in number_of):
            hint = did_you_mean(str(label), class_names) if class_names else "class_names is empty."
            raise DataError(f"Sample {row} has label {label!r}, which is not in class_names; {hint}")

    return np.array([number_of[label] for label in labels.tolist()], dtype=np.int64)


def _is_list_of_samples(inputs: Any, count: int) -> bool:
    """Return whether inputs are a list of `count` single samples, and not of blocks of samples."""
    if not isinstance(inputs, list | tuple) or len(inputs) != count:
        return False

    shapes = {np.shape(row) for row in inputs}
    # A list of N images [1, H, W], or of N blocks of one sample each, [1, C, H, W] or [1, features].
    return not all(shape[:1] == (1,) and len(shape) in (2, 4) for shape in shapes)
