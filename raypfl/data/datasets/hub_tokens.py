"""Texts as the tokens of a language model of the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from raypfl.common.errors import ConfigError
from raypfl.models.published.transformers import FAMILY, folder_of, from_hub, hub_library


def tokenizer_of(name: str) -> Any:
    """Return the tokenizer of a language model, ``transformers:NAME``.

    Raises
    ------
    ConfigError : if there is none, it cannot be downloaded, or its token for padding is not the model's.
    """
    library = hub_library(f"data.tokens is {name!r}")
    member = name.removeprefix(FAMILY)
    tokenizer = from_hub(library.AutoTokenizer, member)
    padding = from_hub(library.AutoConfig, member).pad_token_id
    if padding is None or tokenizer.pad_token_id != padding:
        raise ConfigError(
            f"data.tokens is {name!r}, whose token for padding is {padding} in its config and {tokenizer.pad_token_id} "
            "in its tokenizer; both must have the same one. Choose another model, or save one with it in a folder."
        )
    return tokenizer


def tokenizer_files(name: str) -> list[Path]:
    """Return the files of a tokenizer, such as ``vocab.txt``, in its folder or in the hub's cache, if it is there."""
    folder = folder_of(name.removeprefix(FAMILY))
    if folder is None:
        return []
    return sorted(path for ending in ("json", "txt", "model") for path in folder.glob(f"*.{ending}"))


def vocabulary_of_hub(tokenizer: Any) -> list[str]:
    """Return all tokens by their numbers."""
    return tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))


def hub_tokens(tokenizer: Any, texts: Sequence[str], length: int) -> np.ndarray:
    """Return the tokens of texts, ``int64[n, length]``, with those that the model expects at their ends.

    Raises
    ------
    ConfigError : if these leave no place for a text.
    """
    ends = tokenizer.num_special_tokens_to_add()
    if length <= ends:
        raise ConfigError(
            f"data.length is {length}, but the model's own tokens at the ends of a text take {ends}; raise it."
        )
    encoded = tokenizer(list(texts), padding="max_length", truncation=True, max_length=length)
    return np.array(encoded["input_ids"], np.int64).reshape(len(texts), length)
