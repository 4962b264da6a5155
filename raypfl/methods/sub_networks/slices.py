"""Which entries of a model vector belong to a slice of the network: some units of every hidden layer.

A slice in the whole vector is that vector with zeros outside of the slice. With the layers that are accepted here it
computes what the narrower network would, and training leaves the zeros as they are: a unit whose incoming and outgoing
weights are zero has the output zero, which these layers keep, and none of its weights has a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from raypfl.common.errors import ConfigError
from raypfl.common.exclusive import exclusive
from raypfl.models.flat import FlatModel

_DENSE = (nn.Linear,)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)

_ELEMENTWISE = {
    *(nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish),
    *(nn.Tanh, nn.Softsign, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
}
"""Layers that give zero for a unit whose input is zero, and mix no units."""

_POOLING = {
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
}
_NORMS = (_BatchNorm, nn.GroupNorm, nn.LayerNorm, nn.LocalResponseNorm)

_ELEMENTWISE_NAMES = {
    *("relu", "relu6", "leaky_relu", "elu", "celu", "selu", "gelu", "silu", "mish", "tanh", "softsign"),
    *("dropout", "dropout1d", "dropout2d", "dropout3d", "contiguous"),
}
_POOLING_NAMES = {
    f"{kind}_pool{dimensions}d" for kind in ("max", "avg", "adaptive_max", "adaptive_avg") for dimensions in (1, 2, 3)
}

Window = Callable[[int], Tensor]
"""Returns which of a hidden layer's `width` units a slice has, ``bool[width]``."""


class Units(NamedTuple):
    """The units of an axis of a weight, or of what flows between layers.

    Attributes
    ----------
    layer : the layer whose units they are; None: the network's inputs or outputs, of which every slice has all.
    width : the number of its units; 0 if unknown.
    has_maps : whether a unit is a channel with a map of numbers, and not one number.
    is_flattened : whether the maps are laid out one after the other.
    """

    layer: str | None
    width: int = 0
    has_maps: bool = False
    is_flattened: bool = False


class SlicedNetwork:
    """The units of a network's hidden layers, and which entries of a model vector belong to them.

    Attributes
    ----------
    sides : segment -> the units along its first axes, each with how many indices a unit has.
    hidden : whether an entry is in a hidden layer's weight or bias, ``bool[P+B]``.
    output_of : the number, from 1, of the output whose weight or bias an entry is; 0 for hidden layers' entries,
        ``int64[P+B]``.
    num_outputs : the number of the network's outputs.

    Raises
    ------
    ConfigError : if the slices of this network are not known, or would compute something else than the whole vector
        with zeros outside of them; with the layer and the reason.
    """

    def __init__(self, model: FlatModel):
        # No reference to the model: it is the weak key under which this object is cached.
        self._module = model.module
        self._segments = model.segments
        self._size = model.size
        self._device = model.device
        self.sides: dict[str, tuple[tuple[Units, int], ...]] = {}
        # Masks of the last shift only: all clients of a round have the same one.
        self._masks: dict[float, Tensor] = {}
        self._shift = 0

        output_layer = self._follow(_traced(model.module))
        uncovered = [name for name in model.segments if name not in self.sides]
        if uncovered:
            raise _unknown(f"{uncovered[0]!r} is used in a way that is not known here")

        self.hidden = torch.zeros(model.size, dtype=torch.bool, device=model.device)
        self.output_of = torch.zeros(model.size, dtype=torch.int64, device=model.device)
        for name, sides in self.sides.items():
            segment = model.segments[name]
            layer = name.rpartition(".")[0]
            if layer == output_layer:
                self.num_outputs = segment.shape[0]
                numbers = torch.arange(1, self.num_outputs + 1, device=model.device)
                each = (segment.stop - segment.start) // self.num_outputs
                self.output_of[segment.start : segment.stop] = numbers.repeat_interleave(each)
            elif layer == sides[0][0].layer:
                self.hidden[segment.start : segment.stop] = True

        # The output layer is never cut: every slice has all outputs.
        for name, sides in self.sides.items():
            whole = [(Units(None, side.width) if side.layer == output_layer else side, each) for side, each in sides]
            self.sides[name] = tuple(whole)

    def entries(self, rate: float, shift: int = 0) -> Tensor:
        """Return the entries ``bool[P+B]`` of a slice with ``ceil(rate * width)`` units of every hidden layer.

        It begins at unit ``shift % width`` and goes on, after the last unit, at the first.
        """
        if shift != self._shift:
            self._shift = shift
            self._masks = {}
        if rate not in self._masks:
            self._masks[rate] = self._entries(lambda width: _window(width, rate, shift))
        return self._masks[rate]

    def work(self, rate: float, input_shape: tuple[int, ...]) -> float:
        """Return a slice's multiplications for a sample of this shape, as a share of the whole network's."""
        uses = torch.zeros(self._size, dtype=torch.float64, device=self._device)
        for name, count in self._uses(input_shape).items():
            segment = self._segments[f"{name}.weight"]
            uses[segment.start : segment.stop] = count
        return float(uses[self.entries(rate)].sum() / uses.sum())

    def _uses(self, input_shape: tuple[int, ...]) -> dict[str, int]:
        """Return how often each number of a layer's weight is multiplied with one for a sample, by layer."""
        uses: dict[str, int] = {}
        hooks = []
        with exclusive, torch.no_grad():
            for name, layer in self._module.named_modules():
                if type(layer) in (*_DENSE, *_CONVOLUTIONS):

                    def count(layer: nn.Module, _: object, output: Tensor, name: str = name) -> None:
                        uses[name] = output.numel() // len(layer.weight)  # type: ignore[arg-type]

                    hooks.append(layer.register_forward_hook(count))
            try:
                self._module(next(self._module.parameters()).new_zeros(1, *input_shape))
            finally:
                for hook in hooks:
                    hook.remove()
        return uses

    def _entries(self, window: Window) -> Tensor:
        mask = torch.ones(self._size, dtype=torch.bool)
        for name, sides in self.sides.items():
            segment = self._segments[name]
            view = mask[segment.start : segment.stop].view(segment.shape)
            for axis, (side, each) in enumerate(sides):
                if side.layer is not None:
                    in_slice = window(side.width).repeat_interleave(each)
                    view &= in_slice.view(-1, *[1] * (view.dim() - 1 - axis))
        return mask.to(self._device)

    def _follow(self, graph: fx.Graph) -> str:
        """Follow the units through the network; return the name of its output layer."""
        flows: dict[fx.Node, Units] = {}
        for node in graph.nodes:
            if node.op == "placeholder":
                if flows:
                    raise _unknown("it takes several inputs")
                flows[node] = Units(None)
            elif node.op == "output":
                last = flows[node.args[0]] if isinstance(node.args[0], fx.Node) else Units(None)
                if last.layer is None:
                    raise _unknown("its output is not that of one layer")
                return last.layer
            else:
                if len(node.all_input_nodes) != 1:
                    raise _unknown(f"{_described(node)} does not take the output of one layer alone")
                flows[node] = self._after(node, flows[node.all_input_nodes[0]])
        raise _unknown("it has no output")

    def _after(self, node: fx.Node, before: Units) -> Units:
        """Return the units of what a step of the network returns."""
        if node.op == "call_module":
            return self._after_module(str(node.target), self._module.get_submodule(str(node.target)), before)

        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        if name in _ELEMENTWISE_NAMES:
            return before
        if name in _POOLING_NAMES:
            return _pooled(_described(node), before)
        if name == "flatten" and _flattens_all(node):
            return before._replace(is_flattened=before.has_maps, has_maps=False)
        raise _unknown(f"{_described(node)} is not among the steps that keep units apart")

    def _after_module(self, name: str, module: nn.Module, before: Units) -> Units:
        kind = type(module)
        if kind in _ELEMENTWISE:
            return before
        if kind in _POOLING:
            return _pooled(f"{kind.__name__} {name!r}", before)
        if isinstance(module, nn.Flatten) and (module.start_dim, module.end_dim) == (1, -1):
            return before._replace(is_flattened=before.has_maps, has_maps=False)
        if kind in _DENSE:
            return self._after_dense(name, module, before)
        if kind in _CONVOLUTIONS:
            return self._after_convolution(name, module, before)
        if isinstance(module, _NORMS):
            return self._after_norm(name, module, before)
        raise _unknown(f"{kind.__name__} {name!r} is not among the layers that keep units apart")

    def _after_dense(self, name: str, layer: nn.Module, before: Units) -> Units:
        inputs = int(layer.in_features)  # type: ignore[arg-type]
        each = 1
        if before.layer is not None:
            each = inputs // before.width
            if before.has_maps or each * before.width != inputs or (each > 1 and not before.is_flattened):
                raise _unknown(f"Linear {name!r} has inputs that are not the flattened units of {before.layer!r}")
        after = Units(name, int(layer.out_features))  # type: ignore[arg-type]
        self._add(name, "weight", layer, ((after, 1), (before, each)))
        self._add(name, "bias", layer, ((after, 1),))
        return after

    def _after_convolution(self, name: str, layer: nn.Module, before: Units) -> Units:
        if layer.groups != 1:
            raise _unknown(f"{type(layer).__name__} {name!r} has groups of channels, of which a slice cannot have some")
        if before.layer is not None and not before.has_maps:
            raise _unknown(f"{type(layer).__name__} {name!r} has inputs that are no channels")
        after = Units(name, int(layer.out_channels), has_maps=True)  # type: ignore[arg-type]
        self._add(name, "weight", layer, ((after, 1), (before, 1)))
        self._add(name, "bias", layer, ((after, 1),))
        return after

    def _after_norm(self, name: str, norm: nn.Module, before: Units) -> Units:
        kind = f"{type(norm).__name__} {name!r}"
        if isinstance(norm, nn.GroupNorm) and norm.num_groups == norm.num_channels:
            if before.layer is not None and not before.has_maps:
                raise _unknown(f"{kind} normalises what is no channel")
            self._add(name, "weight", norm, ((before, 1),))
            self._add(name, "bias", norm, ((before, 1),))
            return before
        if isinstance(norm, _BatchNorm):
            raise ConfigError(
                f"{kind} has running statistics. Those of clients with slices of different widths do not fit the whole "
                "network: its layers have more inputs. HeteroFL's authors measure them after training, in a pass over "
                f"all clients' data, which raypfl does not do. {_ADVICE}"
            )
        raise ConfigError(
            f"{kind} normalises over several units at once, so the units of a slice would depend on those outside "
            f"of it: the slice would not compute what the narrower network does. {_ADVICE}"
        )

    def _add(self, layer: str, attribute: str, module: nn.Module, sides: tuple[tuple[Units, int], ...]) -> None:
        if getattr(module, attribute) is None:
            return
        name = f"{layer}.{attribute}"
        if name in self.sides:
            raise _unknown(f"{layer!r} is used twice")
        if name not in self._segments:
            raise _unknown(f"{name!r} is frozen, or shared with another layer")
        self.sides[name] = sides


_ADVICE = (
    "Choose a network without it, such as mlp, lenet, cnn, fedavg_cnn or conv2cifar, or one with instance norm "
    "(convnet, or nn.GroupNorm with a group for each channel)."
)

_networks: WeakKeyDictionary[FlatModel, SlicedNetwork] = WeakKeyDictionary()


def slices_of(model: FlatModel) -> SlicedNetwork:
    """Return the slices of a network, which is followed once; raises as :class:`SlicedNetwork` does."""
    if model not in _networks:
        _networks[model] = SlicedNetwork(model)
    return _networks[model]


def units_of(width: int, rate: float) -> int:
    """Return ``ceil(rate * width)``; a product that is whole up to rounding is that whole number."""
    return math.ceil(rate * width * (1 - 1e-12))


def _window(width: int, rate: float, shift: int) -> Tensor:
    return (torch.arange(width) - shift) % width < units_of(width, rate)


def _traced(module: nn.Module) -> fx.Graph:
    # Tracing patches torch.nn.Module for as long as it runs.
    with exclusive:
        try:
            return fx.Tracer().trace(module)
        except Exception as error:
            raise _unknown(f"its forward cannot be followed ({error})") from error


def _flattens_all(node: fx.Node) -> bool:
    start, end = (*node.args[1:], None, None)[:2]
    axes = (node.kwargs.get("start_dim", start), node.kwargs.get("end_dim", end))
    return axes in ((1, None), (1, -1))


def _pooled(step: str, before: Units) -> Units:
    if before.layer is not None and not before.has_maps:
        raise _unknown(f"{step} pools over units")
    return before


def _described(node: fx.Node) -> str:
    return f"the step {node.name!r}"


def _unknown(reason: str) -> ConfigError:
    return ConfigError(
        f"This network has no slices that are known: {reason}. Slices need dense layers and convolutions one after "
        "the other, with activations that are 0 at 0, dropout, pooling and flatten(1) between them, as in mlp, lenet, "
        "cnn, fedavg_cnn, conv2cifar and convnet."
    )
