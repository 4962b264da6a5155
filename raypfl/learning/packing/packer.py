"""Runs in threads, of which one computes at a time, and the trainings that they join."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from raypfl.common.exclusive import exclusive
from raypfl.learning.executor import GroupTraining, StepCallback
from raypfl.learning.packing.alike import Likeness
from raypfl.learning.packing.numbers import fixed_numbers
from raypfl.learning.packing.process_state import ProcessState
from raypfl.learning.packing.rounding import MOST_ROWS, Calls, OperationCall, rounds_alike
from raypfl.learning.packing.trainings import (
    are_alike,
    different_numbers,
    ends_alone,
    first_clients,
    first_steps,
    joined,
    moved_apart,
    numbers_by_client,
    with_numbers_by_client,
)
from raypfl.learning.vectorised import Vectorised

TRIED_STEPS = 2
"""Steps of the trial that shows whether joined clients keep their bits."""

MOST_KINDS = 32
"""Most kinds of trainings that are tried, so that a loss that differs in every round costs no trial in each."""

Trained = tuple[Tensor, Tensor]


@dataclass
class Spent:
    """Seconds of time, and of CPU time of this process."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0

    @classmethod
    def now(cls) -> Spent:
        """Return both clocks."""
        return cls(time.perf_counter(), time.process_time())


class Packer:
    """Lets runs take turns, each in its own thread, and joins their trainings when all runs wait for one.

    The order of the turns follows from the runs' numbers and from what they train, so it is the same every time.

    `runs` : the number of runs.
    """

    def __init__(self, runs: int):
        # A waiting run releases the lock on PyTorch's global state, although it may hold it several times. Each run
        # has its own condition: a common one would wake all runs at every turn.
        self._turns = [threading.Condition(exclusive) for _ in range(runs)]
        self.runs = runs
        self._active = -1
        self._unstarted = list(range(runs))
        self._ready: list[int] = []
        self._waiting: dict[int, tuple[Packed, GroupTraining]] = {}
        self._outcomes: dict[int, Trained | Exception | None] = {}
        self._is_abandoned = False
        self._spent = [Spent() for _ in range(runs)]
        self._since = Spent.now()
        self._likeness = Likeness()
        self._kinds: list[_Kind] = []
        self._process = ProcessState()

    @contextlib.contextmanager
    def turn(self, run: int) -> Iterator[None]:
        """Wait for a run's first turn; its last one ends with the context."""
        try:
            with exclusive:
                if self._active < 0:
                    self._pass_on()
                self._wait_for_turn(run)
            self._process.restore()
            yield
        finally:
            self._process.restore()
            with exclusive:
                self._pass_on()

    def abandon(self) -> None:
        """Interrupt every run at its next turn."""
        self._is_abandoned = True

    def seconds(self, run: int) -> float:
        """Return how many seconds a run has computed: its turns, and its share, by clients, of joined trainings."""
        seconds = self._spent[run].seconds
        if self._active == run:
            seconds += time.perf_counter() - self._since.seconds
        return seconds

    def cpu_seconds(self, run: int) -> float:
        """Return how many seconds of CPU time a run has taken, counted like :meth:`seconds`."""
        cpu_seconds = self._spent[run].cpu_seconds
        if self._active == run:
            cpu_seconds += time.process_time() - self._since.cpu_seconds
        return cpu_seconds

    def train(self, run: int, executor: Packed, training: GroupTraining) -> Trained:
        """Train a run's group, with groups of other runs if their trainings are alike."""
        process = ProcessState()
        with exclusive:
            self._waiting[run] = (executor, training)
            self._pass_on()
            self._wait_for_turn(run)
        process.restore()

        outcome = self._outcomes.pop(run)
        if isinstance(outcome, Exception):
            raise outcome
        return executor.alone.sgd(training) if outcome is None else outcome

    def _wait_for_turn(self, run: int) -> None:
        while self._active != run:
            self._turns[run].wait()
        if self._is_abandoned:
            raise KeyboardInterrupt

    def _pass_on(self) -> None:
        """Give the turn to another run; if all of them wait for a training, train first."""
        if self._active >= 0:
            self._charge({self._active: 1})
        else:
            self._since = Spent.now()
        if not self._ready and self._unstarted:
            self._ready.append(self._unstarted.pop(0))

        if not self._ready and self._waiting:
            self._process.restore()
            try:
                self._train_alike()
            # Otherwise the waiting runs would wait for ever: each of them ends with the error.
            except Exception as error:
                self._outcomes.update(dict.fromkeys(self._waiting, error))
            self._charge({run: len(training) for run, (_, training) in self._waiting.items()})
            self._ready = sorted(self._waiting)
            self._waiting.clear()

        self._active = self._ready.pop(0) if self._ready else -1
        if self._active >= 0:
            self._turns[self._active].notify()

    def _charge(self, weights: Mapping[int, int]) -> None:
        """Charge the time since the last charge to runs, in proportion to their weights."""
        # CPU time is read only here: with a thread for each run, it takes the kernel several microseconds.
        now = Spent.now()
        for run, weight in weights.items():
            share = weight / sum(weights.values())
            self._spent[run].seconds += (now.seconds - self._since.seconds) * share
            self._spent[run].cpu_seconds += (now.cpu_seconds - self._since.cpu_seconds) * share
        self._since = now

    def _train_alike(self) -> None:
        """Train the runs that wait. A run that is left without an outcome then trains by itself."""
        self._outcomes = dict.fromkeys(self._waiting)
        remaining = sorted(self._waiting)
        while len(remaining) > 1:
            executor, first = self._waiting[remaining[0]]
            alike = [run for run in remaining if are_alike(self._waiting[run][1], first, self._likeness)]
            remaining = [run for run in remaining if run not in alike]
            # A loss with a state may depend on earlier computations; so may those that are like it.
            if executor.may_keep_state(first.loss, first.update):
                continue
            for part in self._parts(alike):
                if len(part) > 1:
                    self._train_part(part)

    def _parts(self, runs: Sequence[int]) -> list[list[int]]:
        """Cut runs into parts with at most `MOST_ROWS` clients each."""
        parts: list[list[int]] = []
        rows = MOST_ROWS
        for run in runs:
            count = len(self._waiting[run][1])
            if rows + count > MOST_ROWS:
                parts.append([])
                rows = 0
            parts[-1].append(run)
            rows += count
        return parts

    def _train_part(self, runs: Sequence[int]) -> None:
        kind = self._kind_of([self._waiting[run] for run in runs])
        joinable = [run for run in runs if kind is not None and kind.takes(self._waiting[run][1])]
        if len(joinable) < 2:
            return

        executor = self._waiting[joinable[0]][0].alone
        try:
            models, losses = executor.sgd(joined([self._waiting[run][1] for run in joinable]))
        except RuntimeError:
            # PyTorch cannot run it: each run tries again alone, and warns as it would alone.
            return
        counts = [len(self._waiting[run][1]) for run in joinable]
        for run, run_models, run_losses in zip(joinable, models.split(counts), losses.split(counts), strict=True):
            # Copies: views would keep the models of all runs in memory.
            self._outcomes[run] = (run_models.clone(), run_losses.clone())

    def _kind_of(self, waiting: Sequence[tuple[Packed, GroupTraining]]) -> _Kind | None:
        """Return the kind of trainings that are alike, tried now if it is new; None: there are too many kinds."""
        first = waiting[0][1]
        at_any_rate = replace(first, update=replace(first.update, lr=1.0))
        by_row = different_numbers([training for _, training in waiting])
        fixed = fixed_numbers(at_any_rate.loss, by_row)
        for kind in self._kinds:
            has_same_numbers = (kind.by_row, kind.fixed) == (by_row, fixed)
            if has_same_numbers and are_alike(kind.training, at_any_rate, self._likeness):
                return kind
        if len(self._kinds) == MOST_KINDS:
            return None
        try:
            keeps_bits = keep_bits([(packed.alone, training) for packed, training in waiting])
        # A function does more than compute with its numbers, or fails: let each run train alone.
        except Exception:
            keeps_bits = (False, False)
        self._kinds.append(_Kind(at_any_rate, by_row, fixed, *keeps_bits))
        return self._kinds[-1]


@dataclass(frozen=True)
class _Kind:
    """What trainings have in common that are alike but for their learning rates.

    Attributes
    ----------
    by_row : the numbers of which each client has its own.
    fixed : the other numbers of functions; with others, a function may compute something else.
    keeps_bits : whether clients have the bits among many that they have among few.
    single_keeps_bits : whether a client has them without company, too.
    """

    training: GroupTraining
    by_row: frozenset[str]
    fixed: dict[str, float]
    keeps_bits: bool
    single_keeps_bits: bool

    def takes(self, training: GroupTraining) -> bool:
        """Return whether a training of this kind can be joined with others."""
        return self.keeps_bits and (self.single_keeps_bits or not ends_alone(training))


def keep_bits(trainings: Sequence[tuple[Vectorised, GroupTraining]]) -> tuple[bool, bool]:
    """Return whether clients keep their bits when trainings are joined, and whether single clients do.

    Kernels may round a row differently if it does not begin at a multiple of 16 bytes, and the last numbers of a tensor
    differently from the first. So the first steps are tried with all rows moved by one, two and three places, and in
    reverse order. The models are moved apart first, since equal models would hide a difference. A few steps do not show
    operations that round differently only in rare cases; :mod:`raypfl.learning.packing.rounding` tries these.
    """
    executors = [executor for executor, _ in trainings]
    trials = [moved_apart(first_steps(training, TRIED_STEPS)) for _, training in trainings]
    single_client = first_clients(trials[0], 1)
    by_row = different_numbers(trials)
    calls = _calls_of_step(trials[0], executors[0], by_row)
    operations_keep_bits, operations_alone = rounds_alike(calls, len(trials[0]), trials[0].start.dtype)
    if not operations_keep_bits:
        return False, False
    alone = [executor.sgd(training) for executor, training in zip(executors, trials, strict=True)]

    def is_kept(count: int) -> bool:
        """Return whether the first clients have the same bits by themselves as with the rest of their group."""
        models, losses = alone[0]
        few = first_clients(trials[0], count)
        few = with_numbers_by_client(few, numbers_by_client(few, by_row))
        return _are_equal(executors[0].sgd(few), (models[:count], losses[:count]))

    # Groups shrink as clients run out of steps. With two or three rows, other numbers are the last ones of a tensor.
    if not all(is_kept(count) for count in range(2, min(4, len(trials[0])))):
        return False, False

    # Orders in which trainings are joined; None is a single client, which shifts the rows after it by one.
    in_order = range(len(trials))
    arrangements: list[list[int | None]] = [[*reversed(in_order)]]
    for num_places in range(4):
        arrangements.append([*[None] * num_places, *in_order])

    for arrangement in arrangements:
        parts = [single_client if number is None else trials[number] for number in arrangement]
        counts = [len(part) for part in parts]
        # `joined` takes the loss of the first training, which computes with the network of its own run.
        models, losses = executors[arrangement[0] or 0].sgd(joined(parts))
        for number, *trained in zip(arrangement, models.split(counts), losses.split(counts), strict=True):
            if number is not None and not _are_equal((trained[0], trained[1]), alone[number]):
                return False, False
    return True, operations_alone and is_kept(1)


def _calls_of_step(training: GroupTraining, executor: Vectorised, by_row: Set[str]) -> list[OperationCall]:
    """Return the operations of a training's first step, in which these numbers have rows."""
    step = first_steps(training, 1)
    step = with_numbers_by_client(step, numbers_by_client(step, by_row))
    with Calls() as noted:
        Vectorised(executor.model, executor.precision).sgd(step)
    return list(noted.calls.values())


def _are_equal(a: Trained, b: Trained) -> bool:
    """Return whether trained models and losses have the same bits; a reported loss may be NaN."""
    return all(torch.equal(x.view(torch.uint8), y.contiguous().view(torch.uint8)) for x, y in zip(a, b, strict=True))


class Packed(Vectorised):
    """An executor whose trainings wait for those of other runs.

    `alone` : the executor of the run's clients.
    """

    def __init__(self, alone: Vectorised, packer: Packer, run: int):
        super().__init__(alone.model, alone.precision, alone.recorder)
        self.alone = alone
        self._packer = packer
        self._run = run

    def sgd(self, training: GroupTraining, observe: StepCallback | None = None) -> Trained:
        if observe is not None or not self._may_join(training):
            return self.alone.sgd(training, observe)
        return self._packer.train(self._run, self, training)

    def _may_join(self, training: GroupTraining) -> bool:
        # A network that may have a state is not recorded, and may depend on earlier computations. And per-sample
        # gradients are added up in chunks whose size depends on the group's.
        if self.recorder is None:
            return False
        has_steps = training.order.index.shape[1] > 0
        leaves_room = 2 * len(training) <= MOST_ROWS
        return has_steps and leaves_room and training.update.sample_rule is None
