"""Image data sets of the Hugging Face hub, which has all public data sets as Parquet files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from raypfl.common.errors import ConfigError, DataError, did_you_mean
from raypfl.common.optional_packages import not_installed
from raypfl.data.datasets.readers.parquet import Parquet
from raypfl.data.datasets.source import DATASETS


@DATASETS.register("hf:NAME")
def hugging_face(member: str) -> type[HuggingFace]:
    """A data set of images on the Hugging Face hub, such as hf:ylecun/mnist; options of parquet, and subset."""
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", member):
        raise ConfigError(
            f"data.name is 'hf:{member}'; it must be 'hf:' and a name on the hub, such as hf:ylecun/mnist."
        )
    return HuggingFace


@dataclass(frozen=True, kw_only=True)
class HuggingFace(Parquet):
    """A data set of images on the Hugging Face hub, in the Parquet files that the hub makes of every data set.

    They are in the hub's cache (``$HF_HOME``), or in that of the folder ``data.root``.

    Attributes
    ----------
    subset : name of the subset, for data sets that have several.
    """

    subset: str | None = None

    def root(self) -> Path:
        try:
            folder = self._snapshot(local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"The data set {self._name} is not in the cache of Hugging Face's hub. Set data.download to true once, "
                "on a machine with a network; after that no network is needed."
            ) from error

        subsets = sorted(subfolder.name for subfolder in folder.iterdir() if subfolder.is_dir())
        subset = self.subset
        if subset is None and len(subsets) == 1:
            subset = subsets[0]
        if subset not in subsets:
            raise ConfigError(
                f"data.subset is {subset!r}, but {self._name} has {len(subsets)} subsets; "
                f"{did_you_mean(str(subset), subsets)}"
            )
        return folder / subset

    def download(self) -> None:
        try:
            self._snapshot(local_files_only=False)
        except (OSError, ValueError) as error:
            raise DataError(
                f"The data set {self._name} could not be downloaded from Hugging Face's hub "
                f"({str(error).splitlines()[0]}). Is there a network, and is this its name? "
                "A private one needs $HF_TOKEN."
            ) from error

    @property
    def _name(self) -> str:
        return self.config.name.partition(":")[2]

    def _snapshot(self, local_files_only: bool) -> Path:
        """Return the folder of the data set in the hub's cache; it is downloaded first if it may be."""
        try:
            from huggingface_hub import snapshot_download
        except ImportError:
            raise not_installed(f"data is {self.config.name!r}", "huggingface_hub", "hf") from None

        folder = snapshot_download(
            self._name,
            repo_type="dataset",
            # The branch in which the hub keeps the Parquet files that it makes of every data set.
            revision="refs/convert/parquet",
            cache_dir=Path(self.config.root).expanduser() if self.config.root else None,
            local_files_only=local_files_only,
        )
        return Path(str(folder))
