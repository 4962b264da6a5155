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
from raypfl.data.datasets.tables import TEST_WORDS

_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp"}
_OTHER_SUFFIXES = {".avif", ".heic", ".heif", ".jfif", ".jp2", ".dng", ".svg"}
_LEVELS = ("class", "group", "split")
_TRAIN_NAMES = {"train", "training"}


class _ListedImage(NamedTuple):
    """An image file, and what its path or a list says of it; the group is empty if there are none."""

    path: Path
    class_name: str
    group: str
    is_test: bool


class _FolderReader(ImageReader):
    """Reads images whose folders name their classes."""

    def root(self) -> Path:
        """Return the folder ``data.root``, which must be there."""
        return self.config.folder("a tree of images")

    def paths(self) -> list[Path]:
        return [path for path in files_under(self.root()) if path.suffix.lower() in _SUFFIXES]

    def raw(self, images: list[_ListedImage], folders: list[str], class_names: list[str]) -> RawData:
        """Return the listed images, training images first.

        Parameters
        ----------
        folders : for each class, what images have for their class name.
        class_names : for each class, its name in the data set.
        """
        images = sorted(images, key=lambda image: image.is_test)
        root = self.root()
        label_of = {folder: label for label, folder in enumerate(folders)}
        is_test = np.array([image.is_test for image in images])
        groups = [image.group for image in images]
        return RawData(
            inputs=self.decode((f"The file {image.path.relative_to(root)}", image.path) for image in images),
            labels=np.array([label_of[image.class_name] for image in images]),
            class_names=class_names,
            test_mask=is_test if is_test.any() else None,
            groups=np.array(groups) if any(groups) else None,
        )


@DATASETS.register("image_folder")
@dataclass(frozen=True, kw_only=True)
class ImageFolder(_FolderReader):
    """A tree of images (data.root) whose folders are classes: ``dog/1.jpg``, as torchvision's ImageFolder reads.

    Attributes
    ----------
    layout : levels of folders from the root down: ``class``, ``split/class``, ``group/split/class``, or
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
        root = self.root()
        paths = self.paths()
        self._warn_of_other_images()
        if not paths:
            raise DataError(f"There is no image in the folder {root}.")

        levels = self.layout.split("/")
        images = [_image_of_path(path, root, levels) for path in paths]
        class_names = sorted({image.class_name for image in images})
        self._refuse_splits_as_classes(class_names)
        if "group" not in levels:
            self._warn_of_groups_as_classes(images, class_names)
        return self.raw(images, class_names, class_names)

    def _warn_of_other_images(self) -> None:
        """Warn of files that are images, but are not read."""
        root = self.root()
        names = [str(path.relative_to(root)) for path in files_under(root) if path.suffix.lower() in _OTHER_SUFFIXES]
        if names:
            warnings.warn(
                f"Images in {root} of other formats are left out: {_first_few(names)}. Convert them to .jpg or .png.",
                stacklevel=2,
            )

    def _refuse_splits_as_classes(self, class_names: list[str]) -> None:
        if len(class_names) > 1 and {name.lower() for name in class_names} <= _TRAIN_NAMES | TEST_WORDS:
            raise DataError(
                f"With data.layout={self.layout}, the folders {_first_few(class_names)} of {self.root()} are classes, "
                f"but these are names of splits. Set data.layout={self._layout_with('split')}."
            )

    def _warn_of_groups_as_classes(self, images: list[_ListedImage], class_names: list[str]) -> None:
        """Warn if several classes have the same subfolders, which then are likely to be the classes."""
        root = self.root()
        depth = len(self.layout.split("/"))
        subfolders = set()
        for image in images:
            folders_within_class = image.path.relative_to(root).parts[depth:-1]
            if folders_within_class:
                subfolders.add((image.class_name, folders_within_class[0]))

        num_classes_with = Counter(subfolder for _, subfolder in subfolders)
        shared = sorted(subfolder for subfolder, count in num_classes_with.items() if count > 1)
        if len(shared) > 1:
            warnings.warn(
                f"With data.layout={self.layout}, the classes in {root} are {_first_few(class_names)}. Several have "
                f"the same folders, {_first_few(shared)}; if those are the classes, set "
                f"data.layout={self._layout_with('group')}.",
                stacklevel=2,
            )

    def _layout_with(self, level: str) -> str:
        """Return the layout with another level above the classes."""
        return self.layout.replace("class", f"{level}/class")


def _first_few(names: list[str]) -> str:
    """Return the first names, and how many there are."""
    more = ", ..." if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more} ({len(names)})"


def _image_of_path(path: Path, root: Path, levels: list[str]) -> _ListedImage:
    """Return an image whose folders say its class, group and split."""
    relative_path = path.relative_to(root)
    folder_of = dict(zip(levels, relative_path.parts[:-1], strict=False))
    if len(folder_of) < len(levels):
        raise DataError(
            f"The image {relative_path} does not lie in folders as data.layout={'/'.join(levels)} says; move or remove "
            "it, or set another layout."
        )

    split = folder_of.get("split", "train").lower()
    if split not in _TRAIN_NAMES | TEST_WORDS:
        raise DataError(
            f"The image {relative_path} lies in {folder_of['split']!r}, but folders of splits are called train and "
            f"test."
        )
    return _ListedImage(path, folder_of["class"], folder_of.get("group", ""), split in TEST_WORDS)


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
        wnids = [line.strip() for _, line in _read_lines("wnids.txt", root)]
        if len(set(wnids)) < len(wnids):
            repeated = next(wnid for row, wnid in enumerate(wnids) if wnid in wnids[:row])
            raise DataError(f"wnids.txt lists {repeated} more than once.")

        images = [*_training_images(root, wnids), *_validation_images(root, wnids)]
        return self.raw(images, wnids, _class_names(root, wnids))


def _training_images(root: Path, wnids: list[str]) -> Iterator[_ListedImage]:
    for wnid in wnids:
        paths = sorted((root / "train" / wnid / "images").glob("*.JPEG"))
        if not paths:
            raise DataError(f"There is no image in train/{wnid}/images of {root}, but wnids.txt lists {wnid}.")
        for path in paths:
            yield _ListedImage(path, wnid, "", is_test=False)


def _validation_images(root: Path, wnids: list[str]) -> Iterator[_ListedImage]:
    annotations = "val/val_annotations.txt"
    folder = root / "val" / "images"
    line_of: dict[str, int] = {}
    for number, line in _read_lines(annotations, root):
        name, wnid, *_ = f"{line}\t".split("\t")
        if wnid not in wnids:
            raise DataError(f"Line {number} of {annotations} has {wnid!r} for a class; {did_you_mean(wnid, wnids)}")
        if name in line_of:
            raise DataError(
                f"Line {number} of {annotations} lists {name}, as line {line_of[name]} does; remove one of them."
            )
        line_of[name] = number
        yield _ListedImage(folder / name, wnid, "", is_test=True)

    unlisted = sorted(path.name for path in folder.glob("*.JPEG") if path.name not in line_of)
    if unlisted:
        raise DataError(
            f"The image val/images/{unlisted[0]} of {root} and {len(unlisted) - 1} more have no line in {annotations}; "
            f"get the data set again."
        )


def _class_names(root: Path, wnids: list[str]) -> list[str]:
    """Return the classes in words, from words.txt if it is there and tells them apart."""
    if not (root / "words.txt").is_file():
        return wnids

    words = dict(line.partition("\t")[::2] for _, line in _read_lines("words.txt", root))
    names = [words.get(wnid, wnid).partition(",")[0] for wnid in wnids]
    return names if len(set(names)) == len(names) else wnids


def _read_lines(name: str, root: Path) -> list[tuple[int, str]]:
    """Return the lines of a list that are not blank, with their numbers from 1."""
    try:
        lines = (root / name).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{name} of {root} cannot be read: {error}") from error
    return [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
