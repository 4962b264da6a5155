"""Steps that are recorded and repeated give the bits of steps that are taken one by one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from raypfl.common.messages import unmarked
from raypfl.learning.objectives.batch import Batch
from raypfl.learning.optimizers import SGD
from raypfl.learning.recording import Replays, may_keep_state
from raypfl.learning.recording.plans import BINDINGS
from raypfl.learning.recording.replays import ReusablePlan
from raypfl.learning.vectorised import Vectorised
from raypfl.methods.local_training import ascent, proximal
from tests.learning.test_gpu_steps import CASES, by_sgd
from tests.support.federation import CLASSES, FP32, Federation, NormalisedConv


class Products(TorchDispatchMode):
    """Notes the shapes of products of matrices."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.shapes = shapes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.bmm.default:
            self.shapes.append(tuple(result.shape))
        return result


class CountingReplays(Replays):
    """Replays that count what they record, and what of it they repeat."""

    min_steps = 4

    def __init__(self) -> None:
        super().__init__()
        self._without_key: list[bool] = []

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        again = super().record(work)
        self._without_key.append(again is not work)
        return again

    @property
    def recordings(self) -> int:
        return len(self._are_repeated)

    @property
    def repeated(self) -> int:
        return sum(self._are_repeated)

    @property
    def _are_repeated(self) -> list[bool]:
        with_key = [work.plan is not None for work in self._known.values() if work.first is not None]
        return [*self._without_key, *with_key]


def trained(case: str, recorder: Any) -> tuple[Tensor, Vectorised]:
    """Return the models of clients with a penalty, each with its loss, and their executor."""
    fed = Federation(**{"training": FP32} | CASES[case], sizes=(30, 15, 60, 33))
    fed.training = replace(fed.training, epochs=2)
    executor = Vectorised(fed.model, recorder=recorder)
    fed.context.executor = executor
    group = fed.group()
    models = unmarked(by_sgd(fed, group))
    return torch.column_stack([models, group.losses]), executor


@pytest.mark.parametrize("case", CASES)
def test_steps_repeated_on_a_cpu_have_the_bits_of_steps_taken_one_by_one(case):
    replays = CountingReplays()
    repeated, _ = trained(case, replays)
    assert torch.equal(repeated, trained(case, None)[0])
    # Noise on a CPU is drawn by generators, which are seeded with values of tensors.
    assert (replays.recordings, replays.repeated) == ((3, 0) if case == "noise" else (3, 3))


def with_loss_of(recorder: Any, factor: Callable[[], float | Tensor]) -> Tensor:
    # Equal sizes need no padding, so that the loss is not tried on padded samples first.
    fed = Federation(sizes=(12, 12, 12), training=replace(FP32, epochs=4))
    fed.context.executor = Vectorised(fed.model, recorder=recorder)
    clients = fed.clients()
    return unmarked(clients.sgd(lambda p, batch: factor() * clients.loss(p, batch), clients.initial))


@pytest.mark.parametrize("kind", ["a number", "a tensor", "what a tensor says"])
def test_a_loss_that_keeps_a_count_is_called_in_every_step(kind):
    def counting() -> Callable[[], float | Tensor]:
        counts = itertools.count(1)
        if kind == "a number":
            return lambda: 1 / next(counts)
        if kind == "a tensor":
            return lambda: torch.tensor(1 / next(counts))
        count = torch.zeros(())
        return lambda: 2.0 if float(count.add_(1)) > 5 else 1.0

    replays = CountingReplays()
    assert torch.equal(with_loss_of(replays, counting()), with_loss_of(None, counting()))
    assert not replays.repeated


class Schedule:
    """A penalty's weight, which changes after ten calls."""

    calls = 0

    def weight(self) -> float:
        self.calls += 1
        return 0.0 if self.calls <= 10 else 1.0

    def weight_by_another_method(self) -> float:
        return self.weight()

    @property
    def current(self) -> float:
        return self.weight()


class WithSchedule:
    """An object that has a schedule."""

    def __init__(self) -> None:
        self.schedule = Schedule()

    def weight(self) -> float:
        return self.schedule.weight_by_another_method()


def late_by_list(calls: list[int]) -> float:
    calls.append(1)
    return 1.0 if len(calls) <= 10 else 2.0


@pytest.mark.parametrize(
    "kind", ["a list", "an object", "a variable", "a default", "a method", "a property", "an object's object"]
)
def test_a_loss_that_changes_after_some_steps_is_called_in_every_step(kind):
    def changing() -> Callable[[], float]:
        calls: list[int] = []
        schedule = Schedule()
        count = 0

        def late() -> float:
            nonlocal count
            count += 1
            return 1.0 if count <= 10 else 2.0

        return {
            "a list": lambda: late_by_list(calls),
            "an object": lambda: schedule.weight(),
            "a variable": late,
            "a default": lambda schedule=schedule: schedule.weight(),
            "a method": schedule.weight_by_another_method,
            "a property": lambda: schedule.current,
            "an object's object": WithSchedule().weight,
        }[kind]

    replays = CountingReplays()
    assert torch.equal(with_loss_of(replays, changing()), with_loss_of(None, changing()))
    assert not torch.equal(with_loss_of(None, changing()), with_loss_of(None, lambda: 1.0))
    assert not replays.recordings


def test_a_loss_may_call_a_built_in_function_and_an_object_that_can_be_called():
    class Twice:
        def __call__(self, value: Tensor) -> Tensor:
            return 2 * value

    for function in (torch.relu, Twice()):
        assert not may_keep_state([lambda value, function=function: function(value)])


def test_a_number_that_a_loss_knows_may_be_another_in_the_next_training():
    replays = CountingReplays()
    for factor in (1.0, 3.0):
        repeated = with_loss_of(replays, lambda value=factor: value)
        assert torch.equal(repeated, with_loss_of(None, lambda value=factor: value))
    assert replays.repeated == replays.recordings


class Shared:
    """A class that has a loss's weight."""

    weight = 1.0


class Weights:
    """An object that has a loss's weight, in several places."""

    def __init__(self, own: float = 1.0) -> None:
        self.own = own
        self.options = {"weight": own}

    def method(self) -> float:
        return self.own

    def __mul__(self, other: Tensor) -> Tensor:
        return self.own * other

    @property
    def computed(self) -> float:
        return self.own


WEIGHTS = Weights()
weight_of_module = 1.0


def own_of(weights: Weights) -> float:
    return weights.own


Times = Callable[[Tensor], Tensor]
PLACES: dict[str, Callable[[float], Times]] = {
    "a variable": lambda weight: lambda value: weight * value,
    "a default": lambda weight: lambda value, factor=weight: factor * value,
    "a variable of a function": lambda weight: (lambda inner: lambda value: inner() * value)(lambda: weight),
    "an attribute": lambda weight: lambda value: WEIGHTS.own * value,
    "an attribute of a new object": lambda weight: (lambda new: lambda value: new.own * value)(Weights(weight)),
    "an attribute that another function reads": lambda weight: lambda value: own_of(WEIGHTS) * value,
    "a method": lambda weight: lambda value: WEIGHTS.method() * value,
    "an operator": lambda weight: lambda value: WEIGHTS * value,
    "an item": lambda weight: lambda value: WEIGHTS.options["weight"] * value,
    "an attribute of a class": lambda weight: lambda value: Shared.weight * value,
    "a variable of the module": lambda weight: lambda value: weight_of_module * value,
    "a tensor": lambda weight: (lambda tensor: lambda value: tensor * value)(torch.tensor(weight)),
    "a property": lambda weight: lambda value: WEIGHTS.computed * value,
    "a name in a text": lambda weight: lambda value: getattr(WEIGHTS, "own") * value,  # noqa: B009
    "an array": lambda weight: (lambda array: lambda value: float(array[0]) * value)(np.array([weight])),
    "a tensor's list": lambda weight: (lambda t: lambda value: t.tolist() * value)(torch.tensor(weight)),
    "a tensor's array": lambda weight: (lambda t: lambda value: float(np.asarray(t)) * value)(torch.tensor(weight)),
}
NOT_COMPARED = ("a property", "a name in a text", "an array", "a tensor's list", "a tensor's array")
"""What is not looked into, so that no step of an earlier round is repeated."""


@pytest.fixture
def reused(monkeypatch: pytest.MonkeyPatch) -> list[ReusablePlan]:
    """The plans of earlier trainings that were used."""
    plans: list[ReusablePlan] = []
    function = ReusablePlan.function

    def noted(plan: ReusablePlan, inputs: Any) -> Callable[[], None]:
        plans.append(plan)
        return function(plan, inputs)

    monkeypatch.setattr(ReusablePlan, "function", noted)
    return plans


def leaky_mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(32, 5), nn.LeakyReLU(), nn.Linear(5, CLASSES))


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(32, 5), nn.Dropout(0.5), nn.Linear(5, CLASSES))


def in_rounds(
    recorder: Any,
    changes: Sequence[Any],
    train: Callable[[Federation, Any], Tensor],
    network: Callable[[], nn.Module] = leaky_mlp,
) -> list[Tensor]:
    """The models after trainings with one executor, each with the next of the changes."""
    fed = Federation(network, sizes=(12, 12, 12), training=replace(FP32, steps=5))
    fed.context.executor = Vectorised(fed.model, recorder=recorder)
    return [unmarked(train(fed, change)) for change in changes]


@pytest.mark.parametrize("place", PLACES)
def test_a_plan_of_an_earlier_round_is_used_only_if_every_number_of_the_loss_is_the_same(place, reused, monkeypatch):
    def train(fed: Federation, weight: float) -> Tensor:
        monkeypatch.setattr(WEIGHTS, "own", weight)
        monkeypatch.setitem(WEIGHTS.options, "weight", weight)
        monkeypatch.setattr(Shared, "weight", weight)
        monkeypatch.setitem(globals(), "weight_of_module", weight)
        clients = fed.clients()
        times = PLACES[place](weight)
        return clients.sgd(lambda p, batch: times(clients.loss(p, batch)), clients.initial)

    weights = (1.0, 1.0, 1.0, 3.0, 1.0, 3.0, 3.0)
    models = in_rounds(Replays(), weights, train)
    for model, expected in zip(models, in_rounds(None, weights, train), strict=True):
        assert torch.equal(model, expected)
    assert not torch.equal(models[0], models[3])

    # Seen, recorded, repeated; seen; repeated; recorded, repeated. What is recorded is repeated in the same training's
    # last three steps. A tensor's numbers are none of the plan's.
    times_reused = {"a tensor": 6} | dict.fromkeys(NOT_COMPARED, 0)
    assert len(reused) == times_reused.get(place, 5)


def with_rate(fed: Federation, lr: float) -> Tensor:
    return fed.clients().sgd(fed.group().loss, fed.model.init(0), lr=lr)


def with_batches(fed: Federation, size: int) -> Tensor:
    return fed.clients().sgd(fed.group().loss, fed.model.init(0), batch_size=size)


def with_clients(fed: Federation, count: int) -> Tensor:
    return fed.clients(range(count)).sgd(fed.group().loss, fed.model.init(0))


def with_trained(fed: Federation, segments: str) -> Tensor:
    return fed.clients().sgd(fed.group().loss, fed.model.init(0), train=segments)


def with_momentum(fed: Federation, momentum: float) -> Tensor:
    return fed.clients().sgd(fed.group().loss, fed.model.init(0), optimizer=SGD(momentum=momentum))


def with_penalty(fed: Federation, strength: float) -> Tensor:
    clients = fed.clients()
    anchor = torch.full_like(clients.initial, strength)
    return clients.sgd(clients.loss, clients.initial, penalty=proximal(strength), anchor=anchor)


def with_perturbation(fed: Federation, rho: float) -> Tensor:
    return fed.clients().sgd(fed.group().loss, fed.model.init(0), perturb=ascent(rho))


def with_slope(fed: Federation, slope: float) -> Tensor:
    fed.model.module[2].negative_slope = slope  # type: ignore[index]
    return fed.clients().sgd(fed.group().loss, fed.model.init(0))


def with_extra(fed: Federation, weight: float) -> Tensor:
    clients = fed.clients()
    return clients.sgd(lambda p, batch, weight: weight * clients.loss(p, batch), clients.initial, weight=weight)


@pytest.mark.parametrize(
    ("train", "changes"),
    [
        (with_rate, (0.1, 0.2)),
        (with_batches, (4, 3)),
        (with_clients, (3, 2)),
        (with_trained, ("1", "3")),
        (with_momentum, (0.5, 0.9)),
        (with_penalty, (0.1, 2.0)),
        (with_perturbation, (0.1, 0.5)),
        (with_perturbation, (0.0, 0.5)),
        (with_slope, (0.1, 0.5)),
        (with_extra, (1.0, 3.0)),
    ],
)
def test_a_plan_of_an_earlier_round_is_used_only_if_the_training_is_the_same(train, changes, reused):
    a, b = changes
    rounds = (a, a, a, b, a, b, b)
    for model, expected in zip(in_rounds(Replays(), rounds, train), in_rounds(None, rounds, train), strict=True):
        assert torch.equal(model, expected)
    assert len(reused) == 5


def test_a_training_of_a_single_step_is_recorded_in_two_rounds_and_then_repeated(reused):
    def single_step(fed: Federation, strength: float) -> Tensor:
        clients = fed.clients()
        start = clients.initial
        return clients.sgd(clients.loss, start, steps=1, penalty=proximal(strength), anchor=start + 1)

    strengths = (0.1, 0.1, 0.1, 0.1, 2.0, 0.1)
    models = in_rounds(Replays(), strengths, single_step, with_dropout)
    assert len(reused) == 2
    for model, expected in zip(models, in_rounds(None, strengths, single_step, with_dropout), strict=True):
        assert torch.equal(model, expected)


def by_minibatches(fed: Federation, change: tuple[float, float]) -> Tensor:
    """Steps and gradients on mini-batches, with a tensor that is another one in every step."""
    strength, lr = change
    clients = fed.clients()
    theta = clients.initial
    for number, batch in enumerate(clients.minibatches(batch_size=4)):
        weight = torch.tensor(0.01 * number)
        correction = batch.grad(lambda p, b, weight=weight: weight * clients.loss(p, b), theta)
        theta = batch.step(
            clients.loss,
            theta,
            lr=lr,
            penalty=proximal(strength),
            correction=correction,
            perturb=ascent(0.1),
            anchor=clients.initial,
        )
    return theta + F.pad(clients.grad(clients.loss, theta), (0, fed.model.num_buffers))


@pytest.mark.parametrize("network", [with_dropout, NormalisedConv])
def test_gradients_on_mini_batches_are_repeated_if_nothing_but_tensors_and_the_learning_rate_changed(network, reused):
    changes = ((0.1, 0.1), (0.1, 0.2), (2.0, 0.3), (0.1, 0.4))
    models = in_rounds(Replays(), changes, by_minibatches, network)
    # Each is seen, recorded twice and then repeated: 4 gradients at the model that all clients share, 16 at theirs, 15
    # and 5 steps, and 4 gradients on all samples.
    assert len(reused) == 1 + 13 + 12 + 2 + 1
    for model, expected in zip(models, in_rounds(None, changes, by_minibatches, network), strict=True):
        assert torch.equal(model, expected)


def test_a_loss_that_notes_its_calls_is_called_in_every_step_on_mini_batches():
    calls = []

    def count_calls(fed: Federation, _: object) -> Tensor:
        clients = fed.clients()

        def noting(p: Tensor, batch: Batch) -> Tensor:
            calls.append(len(calls))
            return clients.loss(p, batch)

        theta = clients.initial
        for batch in clients.minibatches():
            theta = batch.step(noting, theta)
        return theta

    in_rounds(Replays(), (1, 1), count_calls)
    assert len(calls) == 10


def test_a_plan_calls_its_operations_by_bindings_of_the_same_name():
    for operation, binding in BINDINGS.items():
        assert operation._schema.name == f"aten::{binding.__name__}"


@pytest.mark.parametrize("summed", [False, True])
def test_a_transposed_product_is_computed_in_the_order_in_which_it_is_added_unless_an_operation_would_notice(summed):
    generator = torch.Generator().manual_seed(0)
    inputs, gradient = (torch.randn((3, 5, width), generator=generator) for width in (20, 40))
    weights = torch.randn((3, 40, 20), generator=generator)
    total = torch.zeros(())

    def step() -> None:
        product = torch.bmm((inputs * 2).transpose(1, 2), gradient * 2).transpose(1, 2)
        weights.add_(product + weights, alpha=-0.1)
        if summed:
            total.add_(product.sum())

    start = weights.clone()
    repeat = Replays().record(step)
    assert repeat is not step
    repeat()
    repeated = torch.cat([weights.flatten(), total.view(1)])

    weights.copy_(start)
    total.zero_()
    for _ in range(3):
        step()
    assert torch.equal(repeated, torch.cat([weights.flatten(), total.view(1)]))

    shapes: list[tuple[int, ...]] = []
    with Products(shapes):
        repeat()
    assert shapes == [(3, 20, 40) if summed else tuple(weights.shape)]
