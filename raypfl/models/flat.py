"""A network as a function of one flat vector.

A model vector holds all trainable parameters, followed by all buffers that training moves (batch-norm statistics):
``theta = [parameters (P) | buffers (B)]``. A model is therefore one tensor and a set of K models is ``Tensor[K, P+B]``;
statistics are averaged, stored and sent with the parameters. A network without such buffers has B = 0.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from raypfl.common import streams
from raypfl.common.errors import ConfigError, MethodError
from raypfl.common.exclusive import exclusive
from raypfl.models.cudnn import keep_views
from raypfl.models.layout import VectorLayout, select
from raypfl.models.own_weights import OwnWeights
from raypfl.models.parts import common_parts, freeze, frozen_norms, layers_with_parameters, stored_tensors

Input = Tensor | tuple[Tensor, ...]


class FlatModel(VectorLayout):
    """A network that is evaluated at flat vectors.

    Parameters
    ----------
    factory : builds the network, an ``nn.Module``, without arguments. It is called under a fixed seed.
    seed : the seed of the template, which holds everything that is in no model vector: frozen parameters and integer
        buffers.
    dtype, device : the dtype and the device of the network and of the vectors that it creates.
    frozen : a pattern (see :meth:`names`) of the tensors to freeze, in addition to those that the network itself has
        frozen. They are in no vector and exist once, in the template. Batch norm with frozen scale and shift keeps its
        statistics.
    trained : a pattern of the only tensors to train; alternative to `frozen`.

    Attributes
    ----------
    module : the template.
    modules : it and all modules in it.
    num_parameters : P, the number of trainable parameters.
    num_buffers : B, the number of entries that training moves without a gradient.
    size : P + B, the length of a model vector.
    segments : name -> Segment, parameters first, in the network's order.
    parameter_names : names of the segments that are trainable parameters.
    common_parts : part -> names of its tensors, frozen or not; see :func:`raypfl.models.parts.common_parts`.
    output_tensors : attribute of the output layer, such as ``weight`` -> segment.
    mixes_rows : whether the network has batch norm that normalises by the batch during training.
    normalises_vectors : whether some of that batch norm is ``BatchNorm1d``.
    has_dropout : whether the network has dropout, or a module that says ``draws = True`` and calls ``torch.rand_like``.
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
        module = _build(factory, seed, dtype, torch.device(device))
        parts = common_parts(module, stored_tensors(module))
        layers = layers_with_parameters(module)
        if trained is not None:
            freeze(module, stored_tensors(module).keys() - select(trained, module, parts))
        elif frozen is not None:
            freeze(module, select(frozen, module, parts))

        super().__init__(module, parts, dtype, torch.device(device))
        if self.num_parameters == 0:
            raise ConfigError("The network has no trainable parameters, so there is nothing to train.")

        self._output_layer = module.get_submodule(layers[-1])
        self._frozen_norms = frozen_norms(module)
        modules = list(module.modules())
        self.modules = modules
        self._has_own_train = any(type(child).train is not nn.Module.train for child in modules)
        self._train(True)
        # Frozen batch norm stays in evaluation mode, and so does not count.
        batch_norms = [child for child in modules if isinstance(child, _BatchNorm) and child.training]
        self.mixes_rows = bool(batch_norms)
        self.normalises_vectors = any(isinstance(norm, nn.BatchNorm1d) for norm in batch_norms)
        self.has_dropout = any(_draws(child) for child in modules)
        self._norms = [child for child in modules if isinstance(child, _NormBase) and child.running_mean is not None]

        self._find_places()
        output_places = [place for place in self._places if place[1] is self._output_layer]
        self.output_tensors = {attribute: name for name, _, attribute in output_places}
        self._own_weights = OwnWeights((child, attribute) for _, child, attribute in self._places)
        self._loss: LossCall | None = None

    def _find_places(self) -> None:
        """Find every attribute that holds a segment, to be set by setattr or, faster, in the module's own dictionary.

        A tensor that two modules share has one segment and two attributes.
        """
        self._places: list[tuple[str, nn.Module, str]] = []
        self._stores: list[tuple[str, dict[str, Any], str]] = []
        name_of_tensor = {id(tensor): name for name, tensor in self._vector_tensors(self.module).items()}
        for child in self.modules:
            for store in (child._parameters, child._buffers):
                for attribute, tensor in store.items():
                    name = name_of_tensor.get(id(tensor))
                    if name is not None:
                        self._places.append((name, child, attribute))
                        self._stores.append((name, store, attribute))

    def init(self, seed: int) -> Tensor:
        """Return a newly initialised model vector, ``Tensor[P+B]``; the same for the same seed."""
        return self.flatten(self._vector_tensors(_build(self.factory, seed, self.dtype, self.device)))

    def as_module(self, theta: Tensor) -> nn.Module:
        """Return an ordinary module in evaluation mode with a copy of a model vector ``[P+B]``."""
        with exclusive:  # another thread may have put a model's tensors into the network
            module = copy.deepcopy(self.module)
        views = self.unflatten(theta)
        with torch.no_grad():
            for name, tensor in self._vector_tensors(module).items():
                tensor.copy_(views[name])
        return module.eval()

    def __call__(self, theta: Tensor, x: Input) -> Tensor:
        """Return the network's output for inputs ``x[b, ...]``, or a tuple of inputs, at a model vector ``[P+B]``.

        Inside a loss `theta` may also be parameters ``[P]``; :class:`LossCall` says which statistics go with them.
        """
        with exclusive:
            return self._output(theta, x)

    def _output(self, theta: Tensor, x: Input) -> Tensor:
        loss = self._loss
        if loss is not None:
            loss.count()
            if theta is loss.parameters:
                return self.module(x)

        tensors = self.unflatten(theta)
        if self.num_buffers and theta.shape[-1] == self.num_parameters:
            if loss is None or not loss.statistics:
                raise ValueError("This network has batch-norm statistics: outside a loss, pass the whole model vector.")
            tensors |= loss.statistics
        elif self.num_buffers:
            # If `theta` requires a gradient, its statistics do, which batch norm refuses.
            for name in list(self.segments)[len(self.parameter_names) :]:
                tensors[name] = tensors[name].detach()
        with self._computing_with(tensors):
            return self.module(x)

    def features(self, theta: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output layer's inputs ``[b, d]`` and the outputs, at `theta` for inputs ``x[b, ...]``.

        It calls the network once, and both results have gradients.
        """
        features: list[Tensor] = []
        with exclusive:
            hook = self._output_layer.register_forward_pre_hook(lambda _, inputs: features.append(inputs[0]))
            try:
                outputs = self(theta, x)
            finally:
                hook.remove()
        return features[0], outputs

    def running_mean(self, name: str, value: Tensor, momentum: float) -> Tensor:
        """Move a buffer of the network inside a loss to ``(1 - momentum) * buffer + momentum * value``.

        As batch norm's, the buffer is one of the model's statistics, so the next step continues with it.

        Parameters
        ----------
        name : the segment of the buffer.
        value : a tensor of its shape, such as the mean feature of a batch.

        Returns
        -------
        The mean after the step. Its gradient is that of ``momentum * value``.
        """
        if self._loss is None or name not in self._loss.statistics:
            raise MethodError(f"model.running_mean moves a buffer of the network inside a loss; {name!r} is not one.")
        moved = (1 - momentum) * self._loss.statistics[name].clone() + momentum * value
        self._loss.move(name, moved.detach())
        return moved

    def side_call(self) -> AbstractContextManager[Any]:
        """While active, calls change only copies of the statistics of the :class:`LossCall` around it."""
        if self._loss is None or not self.num_buffers:
            return nullcontext()
        return FunctionalCall(self, self._loss.moved())

    def gradient(
        self, loss: Callable[[Tensor], Tensor], theta: Tensor, train: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return value and gradient ``[P]`` of ``loss(p)`` at a model vector ``[P+B]``, and the new statistics ``[B]``.

        ``value, gradient, _ = net.gradient(lambda p: (net(p, x) * y).sum(), theta)``; `train` is the network's mode.
        """
        p = self.parameters(theta).detach().requires_grad_()
        call = FunctionalCall(self, self.buffers(theta).detach())
        with torch.enable_grad(), self.mode(train), call:
            value = loss(p)
            gradient = torch.autograd.grad(value, p)[0]
        return value.detach(), gradient, call.moved().detach()

    @contextmanager
    def mode(self, train: bool) -> Iterator[None]:
        """While active, the network is in training mode, or in evaluation mode, and no other thread can use it."""
        with exclusive:
            before = self.module.training
            self._train(train)
            try:
                yield
            finally:
                self._train(before)

    def _train(self, train: bool) -> None:
        """Set the mode, without the attribute checks of ``nn.Module.train``: 5 % of a small client's evaluation."""
        if self._has_own_train:
            self.module.train(train)
        else:
            for child in self.modules:
                object.__setattr__(child, "training", train)

        if train:
            for norm in self._frozen_norms:  # they keep their statistics
                object.__setattr__(norm, "training", False)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """While active, the network is in evaluation mode, and its module computes with model vectors only."""
        with self.mode(train=False), self._own_weights.refused():
            yield

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

    @contextmanager
    def _computing_with(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """While active, the module has `tensors` in place of the template's.

        This is torch.func.functional_call without its checks, which take a tenth of a small network's step.
        """
        template = [store[attribute] for _, store, attribute in self._stores]
        try:
            for name, store, attribute in self._stores:
                store[attribute] = tensors[name]
            yield
        finally:
            for (_, store, attribute), tensor in zip(self._stores, template, strict=True):
                store[attribute] = tensor

    def _vector_tensors(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the tensors of a module that are in a model vector, by segment name."""
        tensors = stored_tensors(module)
        return {name: tensors[name] for name in self.segments}


def _build(factory: Callable[[], nn.Module], seed: int, dtype: torch.dtype, device: torch.device) -> nn.Module:
    with streams.forked(device):
        streams.seed(device, seed)
        module = factory()
    module = module.to(device=device, dtype=dtype)
    keep_views(module, device)

    for child in module.modules():
        if isinstance(child, _BatchNorm) and child.track_running_stats:
            if child.momentum is None:
                raise ConfigError(
                    "Batch norm with momentum=None (a cumulative average) is not supported; give a number."
                )
            # Only the cumulative average reads this count.
            child.num_batches_tracked = None
    return module.train()


def _draws(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.dropout._DropoutNd) or getattr(module, "draws", False) is True


class LossCall:
    """A context for one evaluation of a loss; it supplies the tensors with which the network computes.

    In training mode that call moves the statistics, so a loss may call a network with batch norm only once.

    Attributes
    ----------
    parameters : ``Tensor[P]``, a vector whose entries the network's own tensors have while the call lasts; or None.
    statistics : the statistics by name that calls at parameters ``[P]`` use and, in training mode, move in place.
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

    def move(self, name: str, value: Tensor) -> None:
        """Set a statistic."""
        self.statistics[name] = value

    def moved(self) -> Tensor:
        """Return the statistics ``[B]`` as they are now; empty if there are none."""
        if not self.statistics:
            return torch.empty(0, dtype=self.model.dtype, device=self.model.device)
        return torch.cat([part.reshape(-1) for part in self.statistics.values()])

    def count(self) -> None:
        """Count a call of the network.

        Raises
        ------
        MethodError : at the second call in training mode, if the network has batch norm.
        """
        if not any(norm.training for norm in self.model._norms):
            return
        self._calls += 1
        if self._calls > 1:
            raise MethodError(
                "A loss called the network twice in training mode, which would move its batch-norm statistics twice. "
                "If a loss and its penalty both need the outputs, compute both in one function that calls the network "
                "once and returns (loss, penalty). To call another model (a teacher, an earlier one), pass it as "
                "teacher=clients.other(theta) and call it as teacher(batch.x): its statistics do not move. To give one "
                "model several inputs, call the network once, on torch.cat([a, b])."
            )


class FunctionalCall(LossCall):
    """Calls compute with given tensors, and with a copy of the statistics ``buffers[B]``.

    Parameters
    ----------
    parameters, leaves : calls at the vector ``parameters[P]`` itself, and of the module, compute with `leaves`, one
        for each of its segments, so that autograd returns one gradient for each segment.
    """

    def __init__(
        self, model: FlatModel, buffers: Tensor, parameters: Tensor | None = None, leaves: Sequence[Tensor] = ()
    ):
        super().__init__(model)
        self.parameters = parameters
        self._buffers = buffers
        self._swapped = ExitStack()
        if model.num_buffers:
            segments = list(model.segments.values())[len(model.parameter_names) :]
            parts = buffers.split([segment.size for segment in segments])
            for segment, part in zip(segments, parts, strict=True):
                self.statistics[segment.name] = part.reshape(segment.shape).clone()
        if parameters is not None:
            self._tensors = dict(zip(model.parameter_names, leaves, strict=True)) | self.statistics

    def __enter__(self) -> Self:
        super().__enter__()
        if self.parameters is not None:
            self._swapped.enter_context(self.model._computing_with(self._tensors))
        return self

    def __exit__(self, *error: object) -> None:
        self._swapped.close()
        super().__exit__(*error)

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
        self._template = model._vector_tensors(model.module)

    def bind(self, vector: Tensor, frozen: Set[str] = frozenset()) -> None:
        """Use the model vector ``[P+B]`` from now on. Segments in `frozen` get no gradient."""
        views = self.model.unflatten(vector.detach())
        names = self.model.parameter_names
        self.parameters = self.model.parameters(vector).detach().requires_grad_()
        self.statistics = {name: views[name] for name in list(views)[len(names) :]}
        leaves = {name: nn.Parameter(views[name], requires_grad=name not in frozen) for name in names}
        self.tensors = list(leaves.values())
        self._set_tensors(leaves | self.statistics)

    def release(self) -> None:
        """Give the network back the tensors that it was built with."""
        self._set_tensors(self._template)

    def move(self, name: str, value: Tensor) -> None:
        # `data` has a version of its own; otherwise autograd would believe that the vector's parameters changed.
        self.statistics[name].data.copy_(value)

    def _set_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        # setattr, not a write into `_parameters`: recurrent layers keep a list of their weights, which setattr updates.
        for name, module, attribute in self.model._places:
            setattr(module, attribute, tensors[name])
