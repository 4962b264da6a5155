"""Encoded images to pixels, in blocks, so that not all need be in memory at once."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from raypfl.common.errors import DataError
from raypfl.datasets.base import DataConfig

# Images in memory at a time, and their bytes. One thread decodes them: small ones take longer with several, which wait
# for each other at every call into Python.
_IMAGES, _BYTES = 1024, 4 << 20
_WIDE_MODES = ("I", "F")


def decoded(sources: Iterable[tuple[str, bytes | Path | None]], config: DataConfig) -> Iterator[np.ndarray]:
    """The pixels of encoded images, in blocks ``uint8[n, 3, H, W]`` of `data.size`, if that is given.

    Grey images come out in three equal channels, so that a data set may mix them with coloured ones; the store keeps
    one channel of a data set that is grey throughout.

    Parameters
    ----------
    sources : of each image, where it stands, as messages say it, and its bytes or file.

    Raises
    ------
    DataError : if an image is missing, damaged, or not of the shape of the first.
    """
    first: tuple[str, np.ndarray] | None = None
    block: list[np.ndarray] = []
    for place, source in sources:
        image = _pixels(source, place, config)
        first = first or (place, image)
        if image.shape != first[1].shape:
            raise DataError(
                f"{place} holds an image of {_shape(image)}, but {first[0]} one of {_shape(first[1])}; "
                f"all must have one shape, to which data.size=64, say, brings them."
            )
        block.append(image)
        if len(block) == _IMAGES or len(block) * image.nbytes >= _BYTES:
            yield np.stack(block)
            block.clear()
    if block:
        yield np.stack(block)


def resized(block: np.ndarray, height: int, width: int) -> np.ndarray:
    """``uint8[n, C, height, width]`` of ``uint8[n, C, H, W]``, bilinear."""
    if block.shape[2:] == (height, width):
        return block
    flat = block.reshape(-1, *block.shape[2:])
    scaled = [np.asarray(Image.fromarray(one).resize((width, height), Image.Resampling.BILINEAR)) for one in flat]
    return np.stack(scaled).reshape(*block.shape[:2], height, width)


def _pixels(source: bytes | Path | None, place: str, config: DataConfig) -> np.ndarray:
    if not source:
        raise DataError(f"{place} has no image bytes.")
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            if image.mode.startswith(_WIDE_MODES):
                raise DataError(f"{place} holds an image of Pillow mode {image.mode}; 8 bits a channel are needed.")
            pixels = np.asarray(_of_size(image.convert("RGB"), config))
    except FileNotFoundError as error:
        raise DataError(f"{place} names the image {source!s}, but there is no such file.") from error
    except DataError:
        raise
    except Exception as error:  # a format's parser may raise anything on damaged bytes
        raise DataError(f"{place} holds a damaged image: {error}") from error
    return pixels.transpose(2, 0, 1)


def _of_size(image: Image.Image, config: DataConfig) -> Image.Image:
    if config.size is None or image.size == (config.size, config.size):
        return image
    wanted = (config.size, config.size)
    if config.fit == "crop":
        return ImageOps.fit(image, wanted, Image.Resampling.BILINEAR)
    return image.resize(wanted, Image.Resampling.BILINEAR)


def _shape(image: np.ndarray) -> str:
    channels, height, width = image.shape
    return f"{channels} x {height} x {width} (channels, height, width)"
