"""Published data sets in torchvision's folders: found, or downloaded by torchvision on request."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from raypfl.common.errors import ConfigError, DataError
from raypfl.data.datasets.source import Reader


@dataclass(frozen=True)
class PublishedReader(Reader):
    """Reads a data set as its authors publish it.

    Attributes
    ----------
    title : the data set's name in messages.
    home : address of the page that has its archive.
    torchvision : name of torchvision's class, which downloads it.
    """

    title: ClassVar[str]
    home: ClassVar[str]
    torchvision: ClassVar[str]

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of the data set's files in ``data.root``; each may be packed, with ``.gz`` at its end."""

    def torchvision_options(self) -> dict[str, Any]:
        """Further arguments of torchvision's class."""
        return {}

    def paths(self) -> list[Path]:
        root = self._root()
        missing = self._missing_names()
        if missing:
            raise ConfigError(
                f"{self.title} is not in {root}: there is no {missing[0]}. Set data.download to true to download it "
                f"into that folder, or get it from {self.home} and unpack it there."
            )
        return [_packed_or_not(root / name) for name in self.names()]

    def download(self) -> None:
        if not self._missing_names():
            return

        root = self._root()
        try:
            # Slow to import, and needed once.
            from torchvision import datasets

            root.mkdir(parents=True, exist_ok=True)
            getattr(datasets, self.torchvision)(str(root), download=True, **self.torchvision_options())
        # The network, the archive and the disk may raise anything.
        except Exception as error:
            raise DataError(
                f"{self.title} could not be downloaded into {root}: {error}. Get it from {self.home} and unpack it "
                f"there."
            ) from error

    def _root(self) -> Path:
        if self.config.root is None:
            raise ConfigError(
                f"data.root is missing: name the folder that {self.title} is in, or that data.download=true downloads "
                f"it into."
            )
        return Path(self.config.root).expanduser()

    def _missing_names(self) -> list[str]:
        return [name for name in self.names() if not _packed_or_not(self._root() / name).is_file()]


def _packed_or_not(path: Path) -> Path:
    """Return `path`, or the path with ``.gz`` at its end if only that exists."""
    packed = path.with_name(path.name + ".gz")
    return packed if packed.is_file() and not path.is_file() else path
