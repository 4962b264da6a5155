"""One group's share of an exchange: the call that it gets, the work on its clients, and the reply."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raypfl.clients.clients import Clients
from raypfl.clients.compression.updates import compressed
from raypfl.clients.context import Context
from raypfl.clients.gpu_errors import out_of_memory
from raypfl.clients.group import ClientGroup
from raypfl.clients.observation import AnalysisHooks, Observation, Observer
from raypfl.clients.replies.reduction import Value, logged_means, reduced
from raypfl.clients.replies.turns import Turns, arguments_of, logged_by_round, values_by_round
from raypfl.common.errors import ClientError, EvaluationError, MethodError, PrivacyError, did_you_mean
from raypfl.common.global_draws import ON_CLIENTS, refuse_unkeyed
from raypfl.common.messages import Each, Mean, Sum, numbers_charged, per_client, unmarked
from raypfl.common.transfer import to_device
from raypfl.common.user_code import where_defined
from raypfl.common.user_warnings import user_warnings
from raypfl.learning.privacy import Masks, Spending, clipped_updates
from raypfl.models.double_precision import refuse_mixed_precision
from raypfl.storage.stacks import Contents, Stack, StackRef
from raypfl.storage.tree import leaves, unflatten

FetchObjects = Callable[[list[Any]], list[Mapping[str, np.ndarray]]]
"""Returns the arrays behind references of the backend."""

WITHOUT_RECORDINGS = (
    "A GPU's memory ran out, so the CUDA graphs in it were given up: from now on the kernels of a step are launched "
    "one by one, which is slower and gives the same results. With a lower engine.group_size, or fewer actors on a GPU, "
    "both may fit."
)


@dataclass(frozen=True)
class SharedTensors:
    """The tensors that a call makes available to every group.

    Attributes
    ----------
    locations : name -> number of the object that contains the tensor, and its key in it.
    objects : number -> ``{key: array}``, or a reference to it.
    reusable : numbers of objects that later calls may use again.
    """

    locations: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    objects: Mapping[int, Any] = field(default_factory=dict)
    reusable: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Call:
    """The message to every group of an exchange.

    Attributes
    ----------
    function : the name of the method's client function, or a function ``f(group, method, **arguments)`` of the engine.
    round, lr : the round's number, from 1, and its learning rate.
    shared : the tensors of the arguments and of the server's state.
    arguments : name -> number or string, or a :class:`raypfl.storage.tree.Leaf` for each tensor, in dicts and lists.
    exchange : a name that is unique among the function's exchanges in the round.
    server : the server's state in the same form, if the function may read it; tensors are fetched on first use.
    observers : the numbers of the experiment's analyses that see the local steps.
    masked : all clients of the exchange, if they send sums under masks.
    training : whether the exchange is a round's, and not an evaluation's.
    messages : round -> arguments in the same form, if groups have :class:`Turns`, in place of `arguments`.
    """

    function: str | Callable[..., Mapping[str, Any]]
    round: int
    lr: float
    shared: SharedTensors = SharedTensors()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    exchange: str = ""
    server: Mapping[str, Any] | None = None
    observers: tuple[int, ...] = ()
    masked: tuple[int, ...] = ()
    training: bool = False
    messages: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Group:
    """One group of an exchange.

    Attributes
    ----------
    index : the group's position: what groups send is added up along a fixed tree over these.
    positions : the clients' positions in the cohort.
    scattered : the rows of scattered arguments, name -> ``[K, ...]``.
    states : the locations of each client's states, the oldest first.
    length : the expected duration, in any unit.
    seconds : the expected duration in seconds; 0 if unknown.
    tries : the number of remaining tries, this one included. A try ends with a reply or an error.
    deaths : the number of times in a row that its actor may die while no group finishes.
    alone : whether its actor runs no other group, so that the cause of the actor's death is known.
    work : the share of its local steps that each client does, ``float64[K]``; None: all do all of them.
    turns : in an asynchronous run, which round each client was sent its message in, and which one it replies to.
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
    work: np.ndarray | None = None
    turns: Turns | None = None


@dataclass
class Reply:
    """The result of a group.

    Attributes
    ----------
    values : the values that the client function returned, by name.
    losses : mean training losses, ``[K]``; None if nothing was trained.
    new_states : the contents of the clients' new states; None if they did not change.
    notes : the warnings of the work.
    logged : the numbers that clients logged, as means.
    observed : the observations of analyses, by the analyses' numbers.
    """

    values: dict[str, Value]
    losses: np.ndarray | None
    seconds: float
    new_states: Contents | None = None
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

    # Gradients may be off in this process, for example if Ctrl-C left it in a `no_grad` block.
    @torch.enable_grad()
    def work(
        self, call: Call, fetch_objects: FetchObjects, group: Group, states: list[Mapping[str, np.ndarray]]
    ) -> tuple[Reply, Stack | None]:
        """Run the call's function for a group; return its reply, and its clients' changed states or None.

        If a GPU's memory runs out and recorded steps take some of it, they are given up, and the group runs again.

        `fetch_objects` returns the arrays behind the backend's references; large ones are fetched once.
        """
        try:
            return self._work(call, fetch_objects, group, states)
        except Exception as error:
            if not (out_of_memory(error) and self.context.stop_recording()):
                raise
        # Here the error is gone, which kept the tensors of the first try.
        torch.cuda.empty_cache()
        reply, stack = self._work(call, fetch_objects, group, states)
        reply.notes.append(WITHOUT_RECORDINGS)
        return reply, stack

    def _work(
        self, call: Call, fetch_objects: FetchObjects, group: Group, states: list[Mapping[str, np.ndarray]]
    ) -> tuple[Reply, Stack | None]:
        started = time.perf_counter()
        client_group = self._client_group(call, group, states)

        def fetch(skeleton: Any) -> Any:
            """Fill in the tensors that the server sent."""
            tensors = self._tensors(call.shared, leaves(skeleton), fetch_objects)
            client_group.share(tensors)
            return unflatten(skeleton, tensors)

        arguments = self._arguments(call, group, fetch)
        with user_warnings() as texts:
            returned = self._run(call, client_group, arguments)
        self._refuse_changed(call, client_group)

        values = self._values(call, group, client_group, returned, arguments)
        logged = logged_means(client_group.logged)
        if group.turns is not None:
            logged = logged_by_round(client_group.logged, group.turns)

        stack = None
        new_states = None
        if client_group.state.changed:
            stack, new_states = client_group.state.stack()

        reply = Reply(
            values=values,
            losses=None if client_group.losses is None else client_group.losses.cpu().numpy(),
            notes=sorted(texts),
            logged=logged,
            observed=client_group.observer.observations if client_group.observer else {},
            new_states=new_states,
            spent=client_group.spent,
            seconds=time.perf_counter() - started,
        )
        return reply, stack

    def _arguments(self, call: Call, group: Group, fetch: Callable[[Any], Any]) -> dict[str, Any]:
        """Return the arguments of the client function; `fetch` fills in the tensors that the server sent."""
        if group.turns is None:
            device = self.context.model.device
            arguments = fetch(dict(call.arguments))
            for name, array in group.scattered.items():
                arguments[name] = per_client(_tensor(array, device))
        else:
            arguments = arguments_of(group.turns, lambda round: fetch(dict(call.messages[round])))

        if call.server is not None:
            arguments["server"] = _ServerState(call.server, fetch)
        return arguments

    def _client_group(self, call: Call, group: Group, states: list[Mapping[str, np.ndarray]]) -> ClientGroup:
        name = call.function if isinstance(call.function, str) else "personal model"
        reads_test = not call.training or getattr(self.method, "test_data_in_training", False)
        client_group = ClientGroup(
            self.context.of(group.clients),
            group.clients,
            call.round,
            call.lr if group.turns is None else group.turns.lr,
            states,
            exchange=(name, call.exchange),
            reads_test=reads_test,
            work=group.work,
            rounds=None if group.turns is None else group.turns.rounds,
        )
        if call.observers:
            analyses = {number: self.analyses[number] for number in call.observers}
            client_group.observer = Observer(self.context, analyses, group.clients, call.round)
        return client_group

    def _run(self, call: Call, client_group: ClientGroup, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        if not isinstance(call.function, str):
            return call.function(client_group, self.method, **arguments)
        function = getattr(self.method, call.function)
        model = self.context.model
        with refuse_unkeyed(function, model.device, ON_CLIENTS), refuse_mixed_precision(model.dtype):
            return function(Clients(client_group), **arguments)

    def _values(
        self, call: Call, group: Group, client_group: ClientGroup, returned: Any, arguments: Mapping[str, Any]
    ) -> dict[str, Value]:
        function = (
            where_defined(getattr(self.method, call.function)) if isinstance(call.function, str) else "The engine"
        )
        if not isinstance(returned, Mapping | None):
            kind = "tensor" if isinstance(returned, Tensor) else type(returned).__name__
            raise MethodError(
                f'{function} returned a {kind}; it must return a dict, such as {{"theta": Mean(trained)}}.'
            )

        for name, value in (returned or {}).items():
            if isinstance(value, Mean | Sum | Each) and not isinstance(value.rows, Tensor):
                raise MethodError(
                    f"{function} returned {name!r} as {type(value).__name__} of a {type(value.rows).__name__}; it "
                    "takes a tensor with a row for each client, such as torch.as_tensor(rows)."
                )
            if isinstance(value, Mean):
                _refuse_unless_finite(function, name, value, client_group)

        messages = dict(returned or {})
        if self.context.compressor is not None and call.training:
            messages = compressed(self.context.compressor, client_group, messages, arguments)

        if group.turns is not None:
            return values_by_round(function, messages, arguments, group.turns)

        keeps_rows = self.context.sends_rows and call.training
        clips_updates = self.context.privacy.protects_clients and isinstance(call.function, str)
        values = {}
        for name, value in messages.items():
            if clips_updates:
                value = self._clip(function, name, value, arguments)
            if call.masked:
                values[name] = self._masked_sum(call, function, name, value, group.clients)
            else:
                values[name] = reduced(function, name, value, len(group.clients), keeps_rows)
        return values

    def _masked_sum(self, call: Call, function: str, name: str, value: Any, ids: tuple[int, ...]) -> Value:
        """Sum the clients' rows under masks; a client is charged for whole rows, since masks hide its zeros."""
        plain = reduced(function, name, value, len(ids))
        if isinstance(value, Each):
            raise PrivacyError(
                f"{function} returns {name!r} as a row for each client, but with privacy.secure_aggregation the server "
                "sees only sums over the cohort. Choose a method that needs only these (fedavg, ditto, ...), or set "
                "it to false."
            )

        if isinstance(value, Mean) and value.can_be_empty:
            raise PrivacyError(
                f"{function} returns {name!r} as a mean to which no client, or only one, may contribute "
                "(can_be_empty), and privacy.secure_aggregation cannot hide a single client's message. Choose a "
                "method, or an option of this one, with which all clients contribute, or set it to false."
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
            num_bytes=numbers * 8,
            masked=torch.as_tensor(plain.array).dtype,
            contributors=contributors,
        )

    def _clip(self, function: str, name: str, value: object, arguments: Mapping[str, Any]) -> Mean:
        """Clip each client's update in a mean."""
        before = arguments.get(name)
        if not (isinstance(value, Mean) and isinstance(before, Tensor) and value.rows.shape[1:] == before.shape):
            raise PrivacyError(
                f"{function} returns {name!r}, which is not the mean of an argument of that name after training, so "
                "the server cannot clip clients' updates of it and add noise. Choose a method that returns only "
                "such means (fedavg, ditto, ...), privacy.unit=sample, or no privacy."
            )
        if value.weight is not None:
            raise PrivacyError(
                f"{function} weights {name!r}, so clients would need different amounts of noise. Return the Mean "
                "without a weight, by method.weighting=uniform where there is this option, or leave privacy out."
            )
        return replace(value, rows=clipped_updates(unmarked(value.rows), before, self.context.privacy))

    def _tensors(self, shared: SharedTensors, names: list[str], fetch_objects: FetchObjects) -> dict[str, Tensor]:
        """Return the tensors of these names; objects that this process already has are not fetched again."""
        still_needed = shared.objects.keys() | shared.reusable
        self._objects = {number: tensors for number, tensors in self._objects.items() if number in still_needed}

        locations = {name: shared.locations[name] for name in names}
        missing = sorted({number for number, _ in locations.values()} - self._objects.keys())
        objects = fetch_objects([shared.objects[number] for number in missing])
        for number, arrays in zip(missing, objects, strict=True):
            self._objects[number] = {key: self._shared_tensor(array) for key, array in arrays.items()}
        return {name: self._objects[number][key] for name, (number, key) in locations.items()}

    def _shared_tensor(self, array: np.ndarray) -> Tensor:
        # The inline backend has made a copy, so no further one is needed.
        if array.flags.owndata and array.flags.writeable:
            return to_device(array, self.context.model.device)
        return _tensor(array, self.context.model.device)

    def _refuse_changed(self, call: Call, client_group: ClientGroup) -> None:
        for name, (tensor, version) in client_group.shared.items():
            if tensor._version != version:
                self._objects = {}
                vars(client_group.context).pop("initial", None)
                function = call.function if isinstance(call.function, str) else call.arguments["maker"]
                argument = _subscripted(name)
                raise MethodError(
                    f"{where_defined(getattr(self.method, function))} changed {argument} in place, "
                    f"but all clients share it; work on {argument}.clone()."
                )


class _ServerState(Mapping[str, Any]):
    """The server's state, whose entries are fetched on first use."""

    def __init__(self, entries: Mapping[str, Any], fetch: Callable[[Any], Any]):
        self._entries = entries
        self._fetch = fetch
        self._fetched: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._entries:
            raise KeyError(f"The server's state has no {name!r}; {did_you_mean(name, self._entries)}")
        if name not in self._fetched:
            self._fetched[name] = self._fetch(self._entries[name])
        return self._fetched[name]

    def __setitem__(self, name: str, value: Any) -> None:
        raise EvaluationError(
            f"server[{name!r}] cannot be set in an evaluation, which changes nothing. What the server remembers is set "
            "in round(self, server, cohort)."
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _tensor(array: np.ndarray, device: torch.device) -> Tensor:
    """Return a copy of an array on a device.

    Ray's arrays are read-only shared memory, which Ray cannot free while a tensor refers to it.
    """
    return to_device(np.array(array) if device.type == "cpu" else array, device)


def _subscripted(path: str) -> str:
    """Return the path of a tensor that the server sent, such as ``server/theta``, as Python code."""
    name, *keys = path.split("/")
    if name.isdigit():  # the round that an asynchronous message was sent in
        name, *keys = keys
    return name + "".join(f"[{key}]" if key.isdigit() else f'["{key}"]' for key in keys)


def _refuse_unless_finite(function: str, name: str, mean: Mean, group: ClientGroup) -> None:
    """Raise a ClientError for clients whose row of a mean has nan or infinity: it would spoil the mean."""
    rows = unmarked(mean.rows).detach()
    # The sum is finite only if all numbers are, and takes a fraction of the time of a check of each.
    if not rows.is_floating_point() or math.isfinite(rows.sum()):
        return

    is_finite = rows.reshape(len(rows), -1).isfinite().all(1).tolist() if rows.dim() else []
    failed = [k for k, is_good in enumerate(is_finite[: len(group)]) if not is_good]
    if failed:
        k = failed[0]
        raise ClientError(
            f"{function} returned {name!r} with nan or infinity for client {group.ids[k]} in round {group.rounds[k]}. "
            f"Look at what the function does with the trained model, and at training.lr ({group.lr:.3g} now).",
            clients=[group.ids[k] for k in failed],
            repeatable=True,
        )
