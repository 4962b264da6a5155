"""One group's share of an exchange: what is sent to where the clients are, what is done there, what comes back."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from raypfl.clients.clients import Clients
from raypfl.clients.context import Context
from raypfl.clients.group import ClientGroup
from raypfl.clients.observation import AnalysisHooks, Observation, Observer
from raypfl.common.errors import MethodError, PrivacyError
from raypfl.common.messages import Each, Mean, Sum, numbers_charged, per_client, unmarked
from raypfl.common.user_code import where_defined
from raypfl.learning.privacy import Masks, Spending, clipped_updates
from raypfl.learning.unkeyed import ON_CLIENTS, refuse_unkeyed
from raypfl.storage.states import Contents, Stack, StackRef
from raypfl.storage.tree import leaves, unflatten

Open = Callable[[list[Any]], list[Mapping[str, np.ndarray]]]


@dataclass(frozen=True)
class SharedTensors:
    """The tensors that a call makes available to every group.

    Attributes
    ----------
    where : name -> number of the object that holds the tensor, and its key in it.
    objects : number -> ``{key: array}``, or a reference to it.
    kept : numbers of objects that later calls may use again.
    """

    where: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    objects: Mapping[int, Any] = field(default_factory=dict)
    kept: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Call:
    """What every group of an exchange is sent.

    Attributes
    ----------
    function : name of the method's client function, or a function ``f(group, method, **arguments)`` of the engine's.
    round, lr : of the round; rounds are numbered from 1.
    arguments : name -> number or string, or a :class:`raypfl.storage.tree.Leaf` for each tensor, in dicts and lists.
    exchange : what tells this exchange from others of the round.
    server : the server's state in the same form, if the function may look at it; tensors are fetched on first use.
    observers : numbers of the experiment's analyses that see the local steps.
    masked : all clients of the exchange, if they send sums under masks.
    training : whether the exchange is part of training.
    """

    function: str | Callable[..., Mapping[str, Any]]
    round: int
    lr: float
    sent: SharedTensors = SharedTensors()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    exchange: str = ""
    server: Mapping[str, Any] | None = None
    observers: tuple[int, ...] = ()
    masked: tuple[int, ...] = ()
    training: bool = False


@dataclass(frozen=True, eq=False)
class Group:
    """One group of an exchange.

    Attributes
    ----------
    index : its position among the groups, in whose order partial sums are added.
    clients : their numbers. positions : theirs in the cohort.
    scattered : name -> ``[K, ...]``.
    states : where each client's states are, the oldest first.
    length : expected duration, in any unit. seconds : the same in seconds, or 0 if unknown.
    tries : how many are left, this one included. A try ends with a reply or an error.
    deaths : how often its actor may die in a row while no group finishes.
    alone : whether its actor runs no other group, so that the cause of the actor's death is known.
    """

    index: int
    clients: tuple[int, ...]
    positions: np.ndarray
    scattered: Mapping[str, np.ndarray]
    states: Sequence[tuple[StackRef, ...]]
    length: float = 1.0
    seconds: float = 0.0
    tries: int = 1
    deaths: int = 1
    alone: bool = False


@dataclass(frozen=True)
class Value:
    """One value of a reply.

    Attributes
    ----------
    kind : ``each`` (rows per client), or a partial ``sum`` or ``mean`` with its total `weight`.
    numbers : ``int64[K]``, how many numbers each client sends; zeros if it is not charged.
    masked : what `array` is under its masks; None: it has none.
    contributors : under masks, how many clients' rows are not all zeros.
    """

    kind: Literal["each", "sum", "mean"]
    array: np.ndarray
    weight: float
    numbers: np.ndarray
    masked: torch.dtype | None = None
    contributors: int = 0


@dataclass
class Reply:
    """The result of a group.

    Attributes
    ----------
    losses : ``[K]`` mean training losses, or None if nothing was trained.
    seconds : that the group took.
    kept : what its clients' new states contain; None if they did not change.
    notes : warnings.
    logged : the numbers that clients logged, as means.
    observed : what analyses keep of the local steps, by their numbers.
    spent : of the clients' privacy.
    """

    values: dict[str, Value]
    losses: np.ndarray | None
    seconds: float
    kept: Contents | None = None
    notes: list[str] = field(default_factory=list)
    logged: dict[str, Value] = field(default_factory=dict)
    observed: dict[int, list[Observation]] = field(default_factory=dict)
    spent: list[Spending] = field(default_factory=list)


class Worker:
    """The clients' side of one process: runs client functions on groups. The same object inline and in a Ray actor."""

    def __init__(self, context: Context, method: object, analyses: Sequence[AnalysisHooks] = ()):
        self.context = context
        self.method = method
        self.analyses = analyses
        self._objects: dict[int, dict[str, Tensor]] = {}

    @torch.enable_grad()  # whatever this process did before
    def work(
        self,
        call: Call,
        opened: Open,
        group: Group,
        states: list[Mapping[str, np.ndarray]],
    ) -> tuple[Reply, Stack | None]:
        """Run the call's function for a group; returns its reply, and its clients' changed states or None.

        `opened` fetches the arrays behind the backend's references; large ones are fetched once.
        """
        begun = time.perf_counter()
        name = call.function if isinstance(call.function, str) else "personal model"
        exchange = (name, call.exchange)
        reads_test = not call.training or getattr(self.method, "test_data_in_training", False)
        clients = ClientGroup(
            self.context, group.clients, call.round, call.lr, states, exchange=exchange, reads_test=reads_test
        )
        if call.observers:
            analyses = {number: self.analyses[number] for number in call.observers}
            clients.observer = Observer(self.context, analyses, group.clients, call.round)
        versions: dict[str, tuple[Tensor, int]] = {}

        def fetched(skeleton: Any) -> Any:
            tensors = self._tensors(call.sent, leaves(skeleton), opened)
            versions.update({name: (tensor, tensor._version) for name, tensor in tensors.items()})
            clients.received(tensors.values())
            return unflatten(skeleton, tensors)

        rows = {name: per_client(self._tensor(array)) for name, array in group.scattered.items()}
        arguments = {**fetched(dict(call.arguments)), **rows}
        if call.server is not None:
            arguments["server"] = _ServerState(call.server, fetched)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            returned = self._run(call, clients, arguments)
        self._refuse_changed(versions)
        values = self._values(call, returned, clients.ids, arguments)
        losses = None if clients.losses is None else clients.losses.cpu().numpy()
        notes = sorted({str(w.message) for w in caught if issubclass(w.category, UserWarning)})
        stack, kept = clients.state.stack() if clients.state.changed else (None, None)
        logged = _logged(clients)
        observed = clients.observer.seen if clients.observer else {}
        spent = [row for branch in clients.private_trainings for row in branch.rows()]
        return Reply(values, losses, time.perf_counter() - begun, kept, notes, logged, observed, spent), stack

    def _run(self, call: Call, clients: ClientGroup, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        if not isinstance(call.function, str):
            return call.function(clients, self.method, **arguments)
        function = getattr(self.method, call.function)
        with refuse_unkeyed(function, self.context.model.device, ON_CLIENTS):
            return function(Clients(clients), **arguments)

    def _values(
        self, call: Call, returned: Mapping[str, Any] | None, ids: tuple[int, ...], arguments: Mapping[str, Any]
    ) -> dict[str, Value]:
        who = where_defined(getattr(self.method, call.function)) if isinstance(call.function, str) else "The engine"
        if not isinstance(returned, Mapping | None):
            raise MethodError(
                f"{who} returned a {type(returned).__name__}; it must return a dict, such as "
                '{"theta": Mean(trained)}.'
            )
        if self.context.privacy.protects_clients and isinstance(call.function, str):
            returned = {name: self._clipped(who, name, value, arguments) for name, value in (returned or {}).items()}
        if call.masked:
            return {name: self._masked(call, who, name, value, ids) for name, value in (returned or {}).items()}
        return {name: _reduced(who, name, value, len(ids)) for name, value in (returned or {}).items()}

    def _masked(self, call: Call, who: str, name: str, value: Any, ids: tuple[int, ...]) -> Value:
        """A sum of what clients send under masks, in which no row has gaps."""
        plain = _reduced(who, name, value, len(ids))
        if isinstance(value, Each):
            raise PrivacyError(
                f"{who} returns {name!r} as a row for each client, but with privacy.secure_aggregation the server sees "
                "sums over the cohort only. Choose a method that needs no more (fedavg, ditto, ...), or set it to "
                "false."
            )
        rows = unmarked(value.rows).detach().double()
        if isinstance(value, Mean) and value.weight is not None:
            rows = rows * unmarked(value.weight).double().view(-1, *[1] * (rows.dim() - 1))
        masks = Masks(call.masked, self.context.seed, f"mask {call.exchange} {name}", call.round)
        numbers = numbers_charged(name, True, len(ids), rows[0].numel())
        contributors = int((rows.reshape(len(rows), -1) != 0).any(1).sum())
        return replace(
            plain,
            array=masks.sum_of(ids, rows),
            numbers=numbers,
            masked=unmarked(value.rows).dtype,
            contributors=contributors,
        )

    def _clipped(self, who: str, name: str, value: object, arguments: Mapping[str, Any]) -> Mean:
        """A mean of updates, each clipped."""
        sent = arguments.get(name)
        if not (isinstance(value, Mean) and isinstance(sent, Tensor) and value.rows.shape[1:] == sent.shape):
            raise PrivacyError(
                f"{who} returns {name!r}, which is not the mean of an argument of that name after training, so that "
                "the server cannot clip clients' updates of it and add noise. Choose a method that returns only such "
                "means (fedavg, ditto, ...), privacy.unit=sample, or no privacy."
            )
        if value.weight is not None:
            raise PrivacyError(
                f"{who} weights {name!r}, so that clients would need noise of different size; set "
                "method.weighting=uniform, or no privacy."
            )
        return replace(value, rows=clipped_updates(unmarked(value.rows), sent, self.context.privacy))

    def _tensors(self, sent: SharedTensors, names: list[str], opened: Open) -> dict[str, Tensor]:
        """The tensors of these names. What was opened for this call, or is kept for later ones, is not opened again."""
        self._objects = {n: tensors for n, tensors in self._objects.items() if n in sent.objects or n in sent.kept}
        places = {name: sent.where[name] for name in names}
        missing = sorted({number for number, _ in places.values()} - self._objects.keys())
        for number, arrays in zip(missing, opened([sent.objects[n] for n in missing]), strict=True):
            self._objects[number] = {key: self._own(array) for key, array in arrays.items()}
        return {name: self._objects[number][key] for name, (number, key) in places.items()}

    def _own(self, array: np.ndarray) -> Tensor:
        # Ray's arrays are read-only shared memory: a tensor must not write to them, and Ray cannot free them while
        # one refers to them. The inline backend makes copies.
        mine = array.flags.owndata and array.flags.writeable
        return torch.from_numpy(array).to(self.context.model.device) if mine else self._tensor(array)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.array(array)).to(self.context.model.device)

    def _refuse_changed(self, versions: Mapping[str, tuple[Tensor, int]]) -> None:
        for name, (tensor, version) in versions.items():
            if tensor._version != version:
                self._objects = {}
                raise MethodError(
                    f"A client function changed its argument {name!r} in place, but all clients share it; work on "
                    f"{name}.clone()."
                )


class _ServerState(Mapping[str, Any]):
    """The server's state, of which an entry is fetched on first use."""

    def __init__(self, entries: Mapping[str, Any], fetch: Callable[[Any], Any]):
        self._entries, self._fetch = entries, fetch
        self._fetched: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._fetched:
            self._fetched[name] = self._fetch(self._entries[name])
        return self._fetched[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _logged(clients: ClientGroup) -> dict[str, Value]:
    """The numbers that clients logged, summed up; a client that logged NaN has none."""
    values = {}
    for name, rows in clients.logged.items():
        numbers = rows.double()[~rows.isnan()]
        if len(numbers):
            free = np.zeros(len(numbers), np.int64)
            values[name] = Value("mean", numbers.sum().cpu().numpy(), len(numbers), free)
    return values


def _reduced(who: str, name: str, value: object, clients: int) -> Value:
    if not isinstance(value, Mean | Sum | Each):
        raise MethodError(f"{who} returned {name!r} as a {type(value).__name__}; wrap it in Mean, Sum or Each.")
    rows = unmarked(value.rows).detach()
    if rows.dim() == 0 or len(rows) != clients:
        raise MethodError(
            f"{who} returned {name!r} of shape {tuple(rows.shape)}, but the group has {clients} clients: "
            "its first axis must run over them."
        )
    numbers = numbers_charged(name, value.charged, clients, rows[0].numel())
    if isinstance(value, Each):
        return Value("each", rows.cpu().numpy(), 0.0, numbers)
    if isinstance(value, Sum):
        return Value("sum", rows.sum(0).cpu().numpy(), 0.0, numbers)
    if not isinstance(value.weight, torch.Tensor | None):
        raise MethodError(
            f"The weight of Mean {name!r}, which {who} returned, is a {type(value.weight).__name__}; it must be a "
            "tensor with a number for each client, such as clients.num_samples."
        )
    weight = (
        torch.ones(clients, dtype=rows.dtype, device=rows.device) if value.weight is None else unmarked(value.weight)
    )
    if weight.shape != (clients,) or bool((weight < 0).any()):
        raise MethodError(
            f"The weight of Mean {name!r}, which {who} returned, must be a non-negative number for each of the "
            f"group's {clients} clients; it is {weight.tolist()}."
        )
    partial = torch.tensordot(weight.to(rows.dtype), rows, dims=1)
    return Value("mean", partial.cpu().numpy(), float(weight.double().sum()), numbers)
