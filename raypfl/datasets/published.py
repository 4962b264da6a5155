"""Published data sets in torchvision's folders: their files found, or fetched by torchvision if asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from raypfl.common.errors import ConfigError, DataError
from raypfl.datasets.base import DataConfig


@dataclass(frozen=True)
class Published:
    """A data set as its authors publish it.

    Attributes
    ----------
    title : what it is called.
    home : where its archive is found.
    files : names of its files, within ``data.root``, of the variant that a config names; each may be there with ``.gz``
        at its end.
    download : has torchvision fetch it into a folder.
    """

    title: str
    home: str
    files: Callable[[DataConfig], list[str]]
    download: Callable[[Path, DataConfig], object]

    def found(self, config: DataConfig) -> list[Path]:
        """Its files.

        Raises
        ------
        ConfigError : if one is missing; the message tells how to get it.
        """
        root = self._root(config)
        missing = self._missing(root, config)
        if missing:
            raise ConfigError(
                f"{self.title} is not in {root}: there is no {missing[0]}. Set data.download to true to fetch it into "
                f"that folder, or get it from {self.home} and unpack it there."
            )
        return [located(root / name) for name in self.files(config)]

    def fetch(self, config: DataConfig) -> None:
        """Have torchvision fetch it, unless it is there.

        Raises
        ------
        DataError : if that fails.
        """
        root = self._root(config)
        if not self._missing(root, config):
            return
        try:
            root.mkdir(parents=True, exist_ok=True)
            self.download(root, config)
        except Exception as error:  # whatever the network, the archive or the disk may raise
            raise DataError(
                f"{self.title} could not be fetched into {root}: {error}. Get it from {self.home} and unpack it there."
            ) from error

    def _root(self, config: DataConfig) -> Path:
        if config.root is None:
            raise ConfigError(
                f"data.root is missing: name the folder that {self.title} is in, or is to be fetched into with "
                f"data.download=true."
            )
        return Path(config.root).expanduser()

    def _missing(self, root: Path, config: DataConfig) -> list[str]:
        return [name for name in self.files(config) if not located(root / name).is_file()]


def located(path: Path) -> Path:
    """`path`, or that with ``.gz`` at its end if only it is there."""
    packed = path.with_name(path.name + ".gz")
    return packed if packed.is_file() and not path.is_file() else path
