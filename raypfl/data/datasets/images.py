"""Readers of encoded images, which decode them in blocks so that they need not all be in memory at once."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image, ImageOps

from raypfl.common.errors import ConfigError, DataError
from raypfl.data.datasets.source import Reader, require_size

# A block of decoded images ends at this number of images or of bytes. One thread decodes them: for small images,
# several threads are slower, since they wait for each other at every call into Python.
_BLOCK_IMAGES = 1024
_BLOCK_BYTES = 4 << 20
# First letters of Pillow's modes that have more than 8 bits a channel.
_WIDE_MODES = ("I", "F")


@dataclass(frozen=True, kw_only=True)
class ImageReader(Reader):
    """Reads encoded images.

    Attributes
    ----------
    size : height and width that images are scaled to; None: all images must have one size.
    fit : way to make images square. ``stretch`` changes the proportions; ``crop`` scales the shorter side and cuts off
        the rest.
    """

    size: int | None = None
    fit: Literal["stretch", "crop"] = "stretch"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_size(self.size)
        if self.size is None and self.fit != "stretch":
            raise ConfigError(
                f"data.fit is {self.fit!r}, which has no effect without data.size; set that, such as data.size=64, or "
                "leave data.fit out."
            )

    def decode(self, sources: Iterable[tuple[str, bytes | Path | None]]) -> Iterator[np.ndarray]:
        """Decode images to their pixels, in blocks ``uint8[n, 3, H, W]``.

        Grey images get three equal channels, so that a data set may mix them with colour images; the store keeps one
        channel of a data set that is grey throughout.

        Parameters
        ----------
        sources : for each image, what messages call its place, and its bytes or file.

        Raises
        ------
        DataError : if an image is missing, damaged, or not of the shape of the first.
        """
        first: tuple[str, np.ndarray] | None = None
        block: list[np.ndarray] = []
        for place, source in sources:
            image = self._decode_image(source, place)
            first = first or (place, image)
            first_place, first_image = first
            if image.shape != first_image.shape:
                raise DataError(
                    f"{place} holds an image of {_shape(image)}, but {first_place} one of {_shape(first_image)}; "
                    f"all images must have one shape, so set data.size, for example data.size=64."
                )

            block.append(image)
            if len(block) == _BLOCK_IMAGES or len(block) * image.nbytes >= _BLOCK_BYTES:
                yield np.stack(block)
                block.clear()
        if block:
            yield np.stack(block)

    def _decode_image(self, source: bytes | Path | None, place: str) -> np.ndarray:
        """Return the pixels of an image, ``uint8[3, H, W]``, scaled to `size`."""
        if not source:
            raise DataError(f"{place} has no image bytes.")

        try:
            with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
                if image.mode.startswith(_WIDE_MODES):
                    raise DataError(f"{place} holds an image of Pillow mode {image.mode}; 8 bits a channel are needed.")
                # Pillow warns where a palette with transparency is not converted to RGBA first.
                has_transparent_palette = image.mode == "P" and "transparency" in image.info
                colours = image.convert("RGBA").convert("RGB") if has_transparent_palette else image.convert("RGB")
                pixels = np.asarray(self._scale(colours))
        except FileNotFoundError as error:
            raise DataError(f"{place} names the image {source!s}, but there is no such file.") from error
        except DataError:
            raise
        # A format's parser may raise anything on damaged bytes.
        except Exception as error:
            raise DataError(f"{place} holds a damaged image: {error}") from error
        return pixels.transpose(2, 0, 1)

    def _scale(self, image: Image.Image) -> Image.Image:
        if self.size is None or image.size == (self.size, self.size):
            return image

        scale = ImageOps.fit if self.fit == "crop" else Image.Image.resize
        return scale(image, (self.size, self.size), Image.Resampling.BILINEAR)


def resize(block: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resize images ``uint8[n, C, H, W]`` to another height and width; their proportions may change."""
    if block.shape[2:] == (height, width):
        return block

    resized_channels = []
    for channel in block.reshape(-1, *block.shape[2:]):
        image = Image.fromarray(channel).resize((width, height), Image.Resampling.BILINEAR)
        resized_channels.append(np.asarray(image))
    return np.stack(resized_channels).reshape(*block.shape[:2], height, width)


def _shape(image: np.ndarray) -> str:
    return " x ".join(map(str, image.shape)) + " (channels, height, width)"
