"""Trees of images whose folders name classes, domains and splits; and TinyImageNet's own layout."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from raypfl.common.errors import ConfigError, DataError, did_you_mean
from raypfl.data.datasets.images import ImageReader
from raypfl.data.datasets.raw_data import RawData
from raypfl.data.datasets.source import DATASETS, files_under

_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp"}
_LEVELS = ("class", "group", "split")
_TRAIN, _TEST = {"train", "training"}, {"test", "val", "valid", "validation"}


class _Listed(NamedTuple):
    """An image and what its path or a list says about it."""

    path: Path
    class_name: str
    group: str
    is_test: bool


class _FolderReader(ImageReader):
    """Reads images whose folders name their classes."""

    def root(self) -> Path:
        """The folder ``data.root``, which must be there."""
        return self.config.folder("a tree of images")

    def paths(self) -> list[Path]:
        return [path for path in files_under(self.root()) if path.suffix.lower() in _SUFFIXES]

    def raw(self, listed: list[_Listed], classes: list[str], names: list[str], split: bool, grouped: bool) -> RawData:
        """The listed images, training images first; `split`, `grouped`: whether there are such columns."""
        listed, root = sorted(listed, key=lambda image: image.is_test), self.root()
        number = {name: place for place, name in enumerate(classes)}
        return RawData(
            inputs=self.decoded((f"The file {image.path.relative_to(root)}", image.path) for image in listed),
            labels=np.array([number[image.class_name] for image in listed]),
            class_names=names,
            test_mask=np.array([image.is_test for image in listed]) if split else None,
            groups=np.array([image.group for image in listed]) if grouped else None,
        )


@DATASETS.register("image_folder")
@dataclass(frozen=True, kw_only=True)
class ImageFolder(_FolderReader):
    """A tree of images (data.root) whose folders are classes: ``dog/1.jpg``, as torchvision's ImageFolder reads.

    Attributes
    ----------
    layout : the levels of folders from the root down: ``class``, ``split/class``, ``group/split/class``, or
        ``group/class`` as for Office-Home's ``Art/Bed/00001.jpg``. A group is a domain, writer or the like. In a level
        of splits, everything but train is the published test split.
    """

    layout: str = "class"

    def __post_init__(self) -> None:
        super().__post_init__()
        levels = self.layout.split("/")
        if set(levels) - set(_LEVELS) or len(set(levels)) < len(levels) or "class" not in levels:
            raise ConfigError(
                f"data.layout is {self.layout!r}, but must name the levels of folders: 'class' and, where there are "
                f"such levels, 'group' and 'split', as in 'group/split/class'."
            )

    def read(self) -> RawData:
        root, paths, levels = self.root(), self.paths(), self.layout.split("/")
        if not paths:
            raise DataError(f"There is no image in the folder {root}, which data.root names.")
        listed = [_placed(path, root, levels) for path in paths]
        classes = sorted({image.class_name for image in listed})
        self._refuse_splits_as_classes(classes)
        if "group" not in levels:
            self._warn_of_groups_as_classes(listed, classes)
        return self.raw(listed, classes, classes, split="split" in levels, grouped="group" in levels)

    def _refuse_splits_as_classes(self, classes: list[str]) -> None:
        if len(classes) > 1 and {name.lower() for name in classes} <= _TRAIN | _TEST:
            raise DataError(
                f"With data.layout={self.layout}, the folders {_few(classes)} of {self.root()} are classes, but these "
                f"are names of splits. Set data.layout={self._with('split')}."
            )

    def _warn_of_groups_as_classes(self, listed: list[_Listed], classes: list[str]) -> None:
        root, depth = self.root(), len(self.layout.split("/"))
        inside = {(image.class_name, *image.path.relative_to(root).parts[depth:-1][:1]) for image in listed}
        owners = Counter(folder for _, *folders in inside for folder in folders)
        if len(shared := sorted(name for name, count in owners.items() if count > 1)) > 1:
            warnings.warn(
                f"With data.layout={self.layout}, the classes in {root} are {_few(classes)}. Several have the same "
                f"folders, {_few(shared)}; if those are the classes, set data.layout={self._with('group')}.",
                stacklevel=2,
            )

    def _with(self, level: str) -> str:
        """The layout with another level above the classes."""
        return self.layout.replace("class", f"{level}/class")


def _few(names: list[str]) -> str:
    """The first names, and how many there are."""
    return f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''} ({len(names)})"


def _placed(path: Path, root: Path, levels: list[str]) -> _Listed:
    shown = path.relative_to(root)
    at = dict(zip(levels, shown.parts[:-1], strict=False))
    if len(at) < len(levels):
        raise DataError(f"The image {shown} does not lie in folders as data.layout={'/'.join(levels)} says.")
    split = at.get("split", "train").lower()
    if split not in _TRAIN | _TEST:
        raise DataError(f"The image {shown} lies in {at['split']!r}, but folders of splits are called train and test.")
    return _Listed(path, at["class"], at.get("group", ""), split in _TEST)


@DATASETS.register("tiny_imagenet")
class TinyImageNet(_FolderReader):
    """110,000 colour images, 64x64, of 200 classes; data.root is the folder ``tiny-imagenet-200`` as published.

    Images of ``train/<wnid>/images`` are training images; those of ``val/images``, listed in
    ``val/val_annotations.txt``, are the published test split, since ``test`` has no labels. The classes and their order
    are those of ``wnids.txt``.
    """

    def root(self) -> Path:
        return self.config.folder("TinyImageNet: wnids.txt, train/ and val/")

    def paths(self) -> list[Path]:
        lists = ("wnids.txt", "words.txt", "val/val_annotations.txt")
        return [*(self.root() / name for name in lists), *super().paths()]

    def read(self) -> RawData:
        root = self.root()
        classes = [line.strip() for _, line in _lines("wnids.txt", root)]
        if len(set(classes)) < len(classes):
            repeated = next(name for place, name in enumerate(classes) if name in classes[:place])
            raise DataError(f"wnids.txt lists {repeated} more than once.")
        listed = [*_trained(root, classes), *_validated(root, classes)]
        return self.raw(listed, classes, _names(root, classes), split=True, grouped=False)


def _trained(root: Path, classes: list[str]) -> Iterator[_Listed]:
    for wnid in classes:
        images = sorted((root / "train" / wnid / "images").glob("*.JPEG"))
        if not images:
            raise DataError(f"There is no image in train/{wnid}/images of {root}, but wnids.txt lists {wnid}.")
        yield from (_Listed(path, wnid, "", False) for path in images)


def _validated(root: Path, classes: list[str]) -> Iterator[_Listed]:
    shown, folder, rows = "val/val_annotations.txt", root / "val" / "images", dict[str, int]()
    for row, line in _lines(shown, root):
        name, wnid, *_ = f"{line}\t".split("\t")
        if wnid not in classes:
            raise DataError(f"Row {row} of {shown} has {wnid!r} for a class; {did_you_mean(wnid, classes)}")
        if name in rows:
            raise DataError(f"Row {row} of {shown} lists {name}, as row {rows[name]} does; remove one of them.")
        rows[name] = row
        yield _Listed(folder / name, wnid, "", True)
    unlisted = sorted(path.name for path in folder.glob("*.JPEG") if path.name not in rows)
    if unlisted:
        raise DataError(
            f"The image val/images/{unlisted[0]} of {root} and {len(unlisted) - 1} more have no line in {shown}; get "
            f"the data set again."
        )


def _names(root: Path, classes: list[str]) -> list[str]:
    """The classes in words, from words.txt if it is there."""
    if not (root / "words.txt").is_file():
        return classes
    words = dict(line.partition("\t")[::2] for _, line in _lines("words.txt", root))
    names = [words.get(wnid, wnid).partition(",")[0] for wnid in classes]
    return names if len(set(names)) == len(names) else classes


def _lines(name: str, root: Path) -> list[tuple[int, str]]:
    """The lines of a list that are not blank, and their rows."""
    try:
        lines = (root / name).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{name} of {root} cannot be read: {error}") from error
    return [(row, line) for row, line in enumerate(lines) if line.strip()]
