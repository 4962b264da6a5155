"""A network as a function of one flat vector.

A model vector holds all trainable parameters, followed by all buffers that training moves (batch-norm statistics):
``theta = [parameters (P) | buffers (B)]``. A model is therefore one tensor and a set of K models is ``Tensor[K, P+B]``;
statistics are averaged, stored and sent with the parameters. A network without such buffers has B = 0.
"""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from raypfl.common import streams
from raypfl.common.errors import ConfigError, MethodError, did_you_mean
from raypfl.common.exclusive import exclusive
from raypfl.models.parts import common_parts, freeze, frozen_norms, stored, trainable

Input = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True)
class Segment:
    """Where a model vector holds a tensor: ``theta[start:stop].view(shape)``."""

    name: str
    start: int
    stop: int
    shape: torch.Size


class FlatModel:
    """A network that is evaluated at flat vectors.

    Parameters
    ----------
    factory : builds the network, an ``nn.Module``, without arguments. It is called under a fixed seed.
    seed : of the template, which holds everything that is in no model vector: frozen parameters and integer buffers.
    dtype, device : of the network and of the vectors that it creates.
    frozen : pattern (see :meth:`names`) of the tensors to freeze, in addition to those that the network itself has
        frozen. They are in no vector and exist once, in the template. Batch norm with frozen scale and shift keeps its
        statistics.
    trained : pattern of the only tensors to train; alternative to `frozen`.

    Attributes
    ----------
    num_parameters : P, the number of trainable parameters.
    num_buffers : B, how many floating-point numbers training moves without a gradient.
    size : P + B, the length of a model vector.
    segments : name -> Segment, parameters first, in the network's order.
    mixes_rows : whether the network has batch norm that normalises by the batch during training.
    common_parts : part -> names of its tensors, frozen or not; see :func:`raypfl.models.parts.common_parts`.
    """

    def __init__(
        self,
        factory: Callable[[], nn.Module],
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        frozen: str | None = None,
        trained: str | None = None,
    ):
        self.factory = factory
        self.dtype = dtype
        self.device = torch.device(device)
        self.module = self._build(seed)
        self.segments: dict[str, Segment] = {}
        self.common_parts = common_parts(self.module, stored(self.module))
        if trained is not None:
            freeze(self.module, stored(self.module).keys() - self._selected(trained))
        elif frozen is not None:
            freeze(self.module, self._selected(frozen))
        self._frozen_norms = frozen_norms(self.module)
        self._train(True)
        offset, everything = 0, stored(self.module)
        for name in trainable(self.module):
            tensor = everything[name]
            self.segments[name] = Segment(name, offset, offset + tensor.numel(), tensor.shape)
            offset += tensor.numel()
        self.size = offset
        self.parameter_names = [name for name, p in self.module.named_parameters() if p.requires_grad]
        self.num_parameters = sum(self.segments[name].stop - self.segments[name].start for name in self.parameter_names)
        self.num_buffers = self.size - self.num_parameters
        batch_norms = [m for m in self.module.modules() if isinstance(m, _BatchNorm) and m.training]
        self.mixes_rows = bool(batch_norms)
        self.normalises_vectors = any(isinstance(m, nn.BatchNorm1d) for m in batch_norms)
        self.has_dropout = any(isinstance(m, nn.modules.dropout._DropoutNd) for m in self.module.modules())
        self._sizes = [segment.stop - segment.start for segment in self.segments.values()]
        names = {id(tensor): name for name, tensor in self._moving(self.module).items()}
        self._places = [
            (names[id(tensor)], child, leaf)
            for child in self.module.modules()
            for leaf, tensor in [*child._parameters.items(), *child._buffers.items()]
            if id(tensor) in names
        ]
        self._stores: list[tuple[str, dict[str, Any], str]] = [
            (name, child._parameters if leaf in child._parameters else child._buffers, leaf)
            for name, child, leaf in self._places
        ]
        self._norms = [m for m in self.module.modules() if isinstance(m, _NormBase) and m.running_mean is not None]
        self._loss: LossCall | None = None
        if self.num_parameters == 0:
            raise ConfigError("The network has no trainable parameters, so there is nothing to train.")

    def init(self, seed: int) -> Tensor:
        """A newly initialised model vector, ``Tensor[P+B]``; the same for the same seed."""
        return self.flatten(self._moving(self._build(seed)))

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """One vector ``Tensor[P+B]`` from named tensors; the inverse of :meth:`unflatten`."""
        return torch.cat([tensors[name].detach().reshape(-1).to(self.dtype) for name in self.segments])

    def unflatten(self, theta: Tensor) -> dict[str, Tensor]:
        """Views of a model vector ``[P+B]``, or of its parameters ``[P]``, by segment name."""
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
        parts = theta.split(sizes, dim=-1)
        return {s.name: part.reshape((*theta.shape[:-1], *s.shape)) for s, part in zip(segments, parts, strict=True)}

    def as_module(self, theta: Tensor) -> nn.Module:
        """An ordinary module in evaluation mode with a copy of a model vector ``[P+B]``."""
        with exclusive:  # another thread may have put a model's tensors into the network
            module = copy.deepcopy(self.module)
        parts = self.unflatten(theta)
        with torch.no_grad():
            for name, tensor in self._moving(module).items():
                tensor.copy_(parts[name])
        return module.eval()

    def parameters(self, theta: Tensor) -> Tensor:
        """The trainable part of model vectors: ``[..., P+B] -> [..., P]``, a view."""
        return theta[..., : self.num_parameters]

    def buffers(self, theta: Tensor) -> Tensor:
        """The statistics in model vectors: ``[..., P+B] -> [..., B]``, a view."""
        return theta[..., self.num_parameters :]

    def names(self, pattern: str) -> list[str]:
        """Segments that a pattern selects.

        `pattern` is a comma-separated list of names (``fc.weight``), modules (``fc``: everything in it), globs
        (``*.bn*``) and parts that most networks have (``output layer``; see :attr:`common_parts`).

        Raises
        ------
        ConfigError : if an item selects nothing and is not one of the common parts, or if all that the pattern selects
            is frozen.
        """
        chosen = self._selected(pattern)
        if chosen and not chosen & self.segments.keys():
            raise ConfigError(
                f"{pattern!r} selects only frozen tensors ({', '.join(sorted(chosen))}), which no client trains and no "
                "model vector holds."
            )
        return [name for name in self.segments if name in chosen]

    def _selected(self, pattern: str) -> set[str]:
        """Names of all tensors that a pattern selects, frozen or not."""
        names, chosen = list(stored(self.module)), set()
        for part in pattern.split(","):
            part = part.strip()
            hits = [n for n in names if n == part or n.startswith(part + ".") or fnmatch.fnmatch(n, part)]
            if not hits and part not in self.common_parts:
                modules = [name for name, _ in self.module.named_modules() if name]
                known = [*names, *modules, *self.common_parts]
                raise ConfigError(f"No segment of the network matches {part!r}; {did_you_mean(part, known)}")
            chosen |= {*hits, *self.common_parts.get(part, [])}
        return chosen

    def mask(self, pattern: str) -> Tensor:
        """``bool[P+B]``: the entries of a model vector in the segments that `pattern` selects."""
        mask = torch.zeros(self.size, dtype=torch.bool, device=self.device)
        for name in self.names(pattern):
            mask[self.segments[name].start : self.segments[name].stop] = True
        return mask

    def segment(self, theta: Tensor, name: str) -> Tensor:
        """The tensor of that exact name in a model vector, as a view of shape ``[..., *shape]``."""
        if name not in self.segments:
            raise ConfigError(f"The network has no segment {name!r}; {did_you_mean(name, self.segments)}")
        place = self.segments[name]
        return theta[..., place.start : place.stop].reshape((*theta.shape[:-1], *place.shape))

    def __call__(self, theta: Tensor, x: Input) -> Tensor:
        """The network's output for inputs ``x[b, ...]``, or several in a tuple, at a model vector ``[P+B]``.

        Inside a loss `theta` may also be parameters ``[P]``; :class:`LossCall` says which statistics go with them.
        """
        with exclusive:
            return self._output(theta, x)

    def _output(self, theta: Tensor, x: Input) -> Tensor:
        loss = self._loss
        if loss is not None:
            loss.count()
            if theta is loss.parameters:
                return loss.outputs(x)
        tensors = self.unflatten(theta)
        if self.num_buffers and theta.shape[-1] == self.num_parameters:
            if loss is None or not loss.statistics:
                raise ValueError("This network has batch-norm statistics: outside a loss, pass the whole model vector.")
            tensors |= loss.statistics
        return self._with(tensors, x)

    def features(self, theta: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """The output layer's inputs ``[b, d]`` and the outputs, at `theta` for inputs ``x[b, ...]``.

        It calls the network once, and both results have gradients.
        """
        seen: list[Tensor] = []
        layer = self.module.get_submodule(self.common_parts["output layer"][0].rpartition(".")[0])
        with exclusive:
            hook = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
            try:
                outputs = self(theta, x)
            finally:
                hook.remove()
        return seen[0], outputs

    def side_call(self) -> AbstractContextManager[Any]:
        """Within: calls change only copies of the statistics of the :class:`LossCall` around it."""
        if self._loss is None or not self.num_buffers:
            return nullcontext()
        return FunctionalCall(self, self._loss.moved())

    def gradient(
        self, loss: Callable[[Tensor], Tensor], theta: Tensor, train: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Value and gradient ``[P]`` of ``loss(p)`` at a model vector ``[P+B]``, and the statistics ``[B]`` afterwards.

        ``value, slope, _ = net.gradient(lambda p: (net(p, x) * y).sum(), theta)``; `train` is the network's mode.
        """
        p = self.parameters(theta).detach().requires_grad_()
        call = FunctionalCall(self, self.buffers(theta).detach())
        with torch.enable_grad(), self.mode(train), call:
            value = loss(p)
            slope = torch.autograd.grad(value, p)[0]
        return value.detach(), slope, call.moved().detach()

    @contextmanager
    def mode(self, train: bool) -> Iterator[None]:
        """While active, the network is in training mode, or in evaluation mode, and no other thread can use it."""
        with exclusive:
            was = self.module.training
            self._train(train)
            try:
                yield
            finally:
                self._train(was)

    def _train(self, train: bool) -> None:
        """``module.train(train)`` without nn.Module's attribute checks, 5 % of a small client's evaluation."""
        every = list(self.module.modules())
        if any(type(child).train is not nn.Module.train for child in every):
            self.module.train(train)
        else:
            for child in every:
                object.__setattr__(child, "training", train)
        for child in self._frozen_norms if train else ():
            object.__setattr__(child, "training", False)

    @contextmanager
    def bound(self) -> Iterator[BoundModel]:
        """While active, the network computes with its own tensors, and no other thread can use it.

        ``bound.bind(vector)`` replaces the tensors by views of a vector.
        """
        with exclusive:
            bound = BoundModel(self)
            try:
                yield bound
            finally:
                bound.release()

    def _with(self, tensors: Mapping[str, Tensor], x: Input) -> Tensor:
        """The module's output with `tensors` in place of its own.

        This is torch.func.functional_call without its checks, which take a tenth of a small network's step.
        """
        own = [store[leaf] for _, store, leaf in self._stores]
        try:
            for name, store, leaf in self._stores:
                store[leaf] = tensors[name]
            return self.module(x)
        finally:
            for (_, store, leaf), tensor in zip(self._stores, own, strict=True):
                store[leaf] = tensor

    def _build(self, seed: int) -> nn.Module:
        with streams.forked(self.device):
            streams.seed(self.device, seed)
            module = self.factory()
        module = module.to(device=self.device, dtype=self.dtype)
        for child in module.modules():
            if isinstance(child, _BatchNorm) and child.track_running_stats:
                if child.momentum is None:
                    raise ConfigError(
                        "Batch norm with momentum=None (a cumulative average) is not supported; give a number."
                    )
                child.num_batches_tracked = None
        return module.train()

    def _moving(self, module: nn.Module) -> dict[str, Tensor]:
        everything = stored(module)
        return {name: everything[name] for name in self.segments}


class LossCall:
    """A context in which a loss is evaluated once: what the network computes with when the loss calls it.

    In training mode that call moves the statistics, so a loss may call a network with batch norm only once.

    Attributes
    ----------
    parameters : ``Tensor[P]``, a vector for which calls use other tensors, see :meth:`outputs`; or None.
    statistics : by name, what calls at parameters ``[P]`` use and, in training mode, move in place.
    """

    def __init__(self, model: FlatModel):
        self.model = model
        self.parameters: Tensor | None = None
        self.statistics: dict[str, Tensor] = {}
        self._calls = 0
        self._outer: LossCall | None = None

    def __enter__(self) -> Self:
        exclusive.acquire()
        self._outer = self.model._loss
        self.model._loss = self
        self._calls = 0
        return self

    def __exit__(self, *_: object) -> None:
        self.model._loss = self._outer
        exclusive.release()

    def outputs(self, x: Input) -> Tensor:
        """The network's output for ``x[b, ...]`` at `parameters`."""
        raise NotImplementedError

    def moved(self) -> Tensor:
        """The statistics ``[B]`` as they are now."""
        return torch.cat([part.reshape(-1) for part in self.statistics.values()])

    def count(self) -> None:
        """Note a call of the network.

        Raises
        ------
        MethodError : at the second one in training mode, if the network has batch norm.
        """
        if not any(norm.training for norm in self.model._norms):
            return
        self._calls += 1
        if self._calls > 1:
            raise MethodError(
                "A loss called the network twice in training mode, which would move its batch-norm statistics twice. "
                "To call another model (a teacher, an earlier one), pass it as teacher=clients.other(theta) and call "
                "it as teacher(batch.x): its statistics do not move. To give one model several inputs, call the "
                "network once, on torch.cat([a, b])."
            )


class FunctionalCall(LossCall):
    """Calls compute with given tensors, and with a copy of the statistics ``buffers[B]``.

    Parameters
    ----------
    parameters, leaves : calls at the vector ``parameters[P]`` itself compute with `leaves`, one for each of its
        segments, so that autograd returns one gradient for each segment.
    """

    def __init__(
        self, model: FlatModel, buffers: Tensor, parameters: Tensor | None = None, leaves: Sequence[Tensor] = ()
    ):
        super().__init__(model)
        self.parameters = parameters
        self._buffers = buffers
        if model.num_buffers:
            places = list(model.segments.values())[len(model.parameter_names) :]
            parts = buffers.split([place.stop - place.start for place in places])
            self.statistics = {p.name: part.reshape(p.shape).clone() for p, part in zip(places, parts, strict=True)}
        if parameters is not None:
            self._tensors = dict(zip(model.parameter_names, leaves, strict=True)) | self.statistics

    def outputs(self, x: Input) -> Tensor:
        return self.model._with(self._tensors, x)

    def moved(self) -> Tensor:
        return super().moved() if self.statistics else self._buffers


class BoundModel(LossCall):
    """Calls run the network as an ordinary module, whose tensors are views of a vector that training moves in place.

    Attributes
    ----------
    parameters : ``Tensor[P]``, a leaf that requires a gradient.
    tensors : the network's parameters, as leaves, in the order of its segments.
    """

    parameters: Tensor
    tensors: list[nn.Parameter]

    def __init__(self, model: FlatModel):
        super().__init__(model)
        self._template = model._moving(model.module)

    def bind(self, vector: Tensor, still: Set[str] = frozenset()) -> None:
        """Use the model vector ``[P+B]`` from now on. Segments in `still` get no gradient."""
        views, names = self.model.unflatten(vector.detach()), self.model.parameter_names
        self.parameters = self.model.parameters(vector).detach().requires_grad_()
        self.statistics = {name: views[name] for name in list(views)[len(names) :]}
        leaves = {name: nn.Parameter(views[name], requires_grad=name not in still) for name in names}
        self.tensors = list(leaves.values())
        self._place(leaves | self.statistics)

    def release(self) -> None:
        """Give the network back the tensors that it was built with."""
        self._place(self._template)

    def outputs(self, x: Input) -> Tensor:
        return self.model.module(x)

    def _place(self, tensors: Mapping[str, Tensor]) -> None:
        # setattr, not a write into `_parameters`: recurrent layers keep a list of their weights, which setattr updates.
        for name, module, leaf in self.model._places:
            setattr(module, leaf, tensors[name])
