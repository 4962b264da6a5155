"""The layout of model vectors: which tensor of a network is where in them."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from raypfl.common.errors import ConfigError, did_you_mean
from raypfl.models.parts import stored_tensors, trainable_names


@dataclass(frozen=True)
class Segment:
    """The place of a tensor in a model vector: ``theta[start:stop].view(shape)``."""

    name: str
    start: int
    stop: int
    shape: torch.Size

    @property
    def size(self) -> int:
        """The number of entries."""
        return self.stop - self.start


class VectorLayout:
    """The segments of a network's model vectors ``[parameters (P) | buffers (B)]``.

    Parameters
    ----------
    module : the network, with all that is frozen already frozen.
    common_parts : part -> names of its tensors; see :func:`raypfl.models.parts.common_parts`.
    """

    def __init__(
        self, module: nn.Module, common_parts: Mapping[str, list[str]], dtype: torch.dtype, device: torch.device
    ):
        self.module = module
        self.common_parts = common_parts
        self.dtype = dtype
        self.device = device

        self.segments: dict[str, Segment] = {}
        tensors = stored_tensors(module)
        offset = 0
        for name in trainable_names(module):
            tensor = tensors[name]
            self.segments[name] = Segment(name, offset, offset + tensor.numel(), tensor.shape)
            offset += tensor.numel()

        self.size = offset
        self.parameter_names = [name for name, p in module.named_parameters() if p.requires_grad]
        self.num_parameters = sum(self.segments[name].size for name in self.parameter_names)
        self.num_buffers = self.size - self.num_parameters
        self._sizes = [segment.size for segment in self.segments.values()]

    @property
    def num_features(self) -> int:
        """The number of inputs of the output layer, which is the size of a feature vector.

        Raises
        ------
        ConfigError : if the output layer has no weight ``[outputs, inputs]``.
        """
        names = self.common_parts["output layer"]
        weight = stored_tensors(self.module)[names[0]]
        if weight.dim() < 2:
            raise ConfigError(
                f"The network's last layer with parameters has no weight of [outputs, inputs], but {', '.join(names)}: "
                "let it end in a layer such as nn.Linear."
            )
        return weight.shape[1]

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return one vector ``Tensor[P+B]`` from named tensors; the inverse of :meth:`unflatten`."""
        return torch.cat([tensors[name].detach().reshape(-1).to(self.dtype) for name in self.segments])

    def unflatten(self, theta: Tensor) -> dict[str, Tensor]:
        """Return views of a model vector ``[P+B]``, or of its parameters ``[P]``, by segment name."""
        segments = list(self.segments.values())
        sizes = self._sizes
        if theta.shape[-1] != self.size:
            if theta.shape[-1] != self.num_parameters:
                raise ValueError(
                    f"A vector of {theta.shape[-1]} numbers is not a model of this network, which has "
                    f"{self.num_parameters} parameters and {self.num_buffers} buffer entries."
                )
            segments = segments[: len(self.parameter_names)]
            sizes = sizes[: len(segments)]

        views = {}
        for segment, part in zip(segments, theta.split_with_sizes(sizes, dim=-1), strict=True):
            views[segment.name] = part.reshape((*theta.shape[:-1], *segment.shape))
        return views

    def parameters(self, theta: Tensor) -> Tensor:
        """Return the trainable part of model vectors: ``[..., P+B] -> [..., P]``, a view."""
        return theta[..., : self.num_parameters]

    def buffers(self, theta: Tensor) -> Tensor:
        """Return the statistics in model vectors: ``[..., P+B] -> [..., B]``, a view."""
        return theta[..., self.num_parameters :]

    def names(self, pattern: str) -> list[str]:
        """Return the names of the segments that a pattern selects.

        `pattern` is a comma-separated list of names (``fc.weight``), modules (``fc``: everything in it), globs
        (``*.bn*``) and parts that most networks have (``output layer``; see :attr:`common_parts`).

        Raises
        ------
        ConfigError : if an item selects nothing and is not one of the common parts, or if all that the pattern selects
            is frozen.
        """
        selected = select(pattern, self.module, self.common_parts)
        if selected and not selected & self.segments.keys():
            raise ConfigError(
                f"{pattern!r} selects only frozen tensors ({', '.join(sorted(selected))}), which no client trains and "
                "no model vector holds; change model.frozen, model.trained or model.lora, which decide what is trained."
            )
        return [name for name in self.segments if name in selected]

    def mask(self, pattern: str) -> Tensor:
        """Return ``bool[P+B]``: True for the entries of the segments that `pattern` selects."""
        mask = torch.zeros(self.size, dtype=torch.bool, device=self.device)
        for name in self.names(pattern):
            segment = self.segments[name]
            mask[segment.start : segment.stop] = True
        return mask

    def segment(self, theta: Tensor, name: str) -> Tensor:
        """Return the tensor of that exact name in a model vector, as a view of shape ``[..., *shape]``."""
        if name not in self.segments:
            raise ConfigError(f"The network has no segment {name!r}; {did_you_mean(name, self.segments)}")
        segment = self.segments[name]
        return theta[..., segment.start : segment.stop].reshape((*theta.shape[:-1], *segment.shape))


def select(pattern: str, module: nn.Module, common_parts: Mapping[str, list[str]]) -> set[str]:
    """Return the names of all tensors that a pattern selects, frozen or not; see :meth:`VectorLayout.names`."""
    names = list(stored_tensors(module))
    selected: set[str] = set()
    for item in map(str.strip, pattern.split(",")):
        matches = [name for name in names if name == item or name.startswith(f"{item}.") or fnmatch.fnmatch(name, item)]
        if not matches and item not in common_parts:
            # Modules without tensors, such as activations, are no candidates: they select nothing either.
            paths = [path for path, _ in module.named_modules()]
            modules = [path for path in paths if any(name.startswith(f"{path}.") for name in names)]
            candidates = [*names, *modules, *common_parts]
            raise ConfigError(f"No segment of the network matches {item!r}; {did_you_mean(item, candidates)}")

        selected |= {*matches, *common_parts.get(item, [])}
    return selected
