"""Language models of the Hugging Face hub that read texts: ``transformers:NAME``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from raypfl.common.errors import ConfigError
from raypfl.models.architectures.texts import mean_of_words
from raypfl.models.networks import MODELS
from raypfl.models.published.library import import_library, require_known

FAMILY = "transformers:"
"""What the names of these models begin with."""

EXTRA = "transformers"
"""The extra of raypfl that installs the library."""


class LanguageModel(nn.Module):
    """A dense output layer on the mean of a language model's last hidden states, without those of padding.

    Parameters
    ----------
    body : the language model, without an output layer.
    padding : the token of padding.
    """

    def __init__(self, body: nn.Module, width: int, num_classes: int, padding: int):
        super().__init__()
        self.body = body
        self.padding = padding
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        is_word = x != self.padding
        states = self.body(input_ids=x, attention_mask=is_word.long()).last_hidden_state
        return self.head(mean_of_words(states, is_word))


@MODELS.register("transformers:NAME")
def language_model(member: str) -> Callable[..., nn.Module]:
    """Any language model of the Hugging Face hub, or in a folder, that classifies texts; options as in its config.

    The texts' tokens must be its own: ``data.tokens=transformers:NAME``. Its weights are ``model.weights=pretrained``.
    """
    library = hub_library(f"model is '{FAMILY}{member}'")

    def network(input_shape: tuple[int, ...], num_classes: int, num_tokens: int, **options: Any) -> nn.Module:
        config = from_hub(library.AutoConfig, member)
        if options:
            for option in options:
                require_known(f"The config of {member} has no {option!r}", option, config.to_dict())
            config = from_hub(library.AutoConfig, member, **options)
        if num_tokens > config.vocab_size or config.pad_token_id is None:
            raise ConfigError(
                f"The model {member} has {config.vocab_size} tokens, of which {config.pad_token_id} is padding, but "
                f"the texts have {num_tokens}: they must be its own, as with data.tokens={FAMILY}{member}."
            )
        body = without_pooler(library.AutoModel.from_config(config, attn_implementation="eager"))
        return LanguageModel(body, config.hidden_size, num_classes, config.pad_token_id)

    return network


def hub_library(reason: str) -> Any:
    """Import transformers, without its progress bars; `reason` begins the error if it is not installed."""
    library = import_library("transformers", reason, EXTRA)
    library.utils.logging.disable_progress_bar()
    return library


def folder_of(name: str) -> Path | None:
    """Return the folder of a model's files: its own, or that of its revision in the hub's cache; None: there is none.

    Raises
    ------
    ConfigError : if the library that knows the cache is not installed.
    """
    if Path(name).is_dir():
        return Path(name)
    hub = import_library("huggingface_hub", f"{FAMILY}{name} is not a folder", EXTRA)
    try:
        # The file that all models have.
        config = hub.try_to_load_from_cache(name, "config.json")
    except ValueError:  # no model can have this name
        return None
    return Path(config).parent if isinstance(config, str) else None


def without_pooler(model: nn.Module) -> nn.Module:
    """Leave out the layer that summarises the first token, which only pretraining needs."""
    if getattr(model, "pooler", None) is not None:
        model.register_module("pooler", None)
    return model


def from_hub(part: Any, name: str, **options: Any) -> Any:
    """Return ``part.from_pretrained(name)`` from the hub's cache or a folder or, if it is in neither, from the hub.

    Raises
    ------
    ConfigError : if it can be had from none of them, or the folder's path is relative, since Ray's processes have other
        working directories.
    """
    if not name:
        raise ConfigError(f"{FAMILY} names no model: write {FAMILY}NAME, as on the hub, or {FAMILY}/FOLDER.")
    if Path(name).is_dir() and not Path(name).is_absolute():
        raise ConfigError(f"{FAMILY}{name} is a folder; name it by its whole path: {FAMILY}{Path(name).absolute()}")
    try:
        return part.from_pretrained(name, local_files_only=True, **options)
    except (OSError, ValueError):
        pass
    hub = import_library("huggingface_hub", f"{FAMILY}{name} is not in the hub's cache", EXTRA)
    try:
        # Without a network this fails at once, where from_pretrained tries for 50 seconds and prints each try.
        hub.HfApi().repo_exists(name)
        return part.from_pretrained(name, **options)
    except Exception as error:  # whatever the hub's client raises
        raise ConfigError(
            f"{FAMILY}{name} is neither in the cache of the Hugging Face hub nor a folder, and could not be "
            f"downloaded: {str(error).splitlines()[0]}"
        ) from error
