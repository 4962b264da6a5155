"""Recordings on a CPU: the operations below vmap and autograd, as a function of Python code."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

from torch import Tensor

from raypfl.learning.recording.operations import Name, OperationRecorder
from raypfl.learning.recording.plans import MAX_PLANS, StepPlan, plan_of


@dataclass(frozen=True)
class StepSignature:
    """The key and the inputs of steps that are about to be taken.

    Attributes
    ----------
    key : equal for steps with the same operations; ``inputs`` may differ in their numbers.
    inputs : the tensors that the steps use, by name.
    """

    key: Hashable
    inputs: Mapping[str, Tensor]

    @classmethod
    def of(cls, key: Hashable, inputs: Mapping[str, Tensor], free_axes: Mapping[str, int]) -> StepSignature:
        """Add to a key how the inputs lie in memory.

        `free_axes` : input -> an axis along which it is only indexed, so that its length may differ.
        """
        number_of_memory: dict[int, int] = {}
        outlines: list[Hashable] = []
        for name, tensor in inputs.items():
            memory = number_of_memory.setdefault(tensor.untyped_storage().data_ptr(), len(number_of_memory))
            lengths = list(tensor.shape)
            strides = tensor.stride()
            if name in free_axes:
                del lengths[free_axes[name]]
                strides = ()
            start = tensor.storage_offset()
            is_dense = tensor.is_contiguous()
            layout = (tuple(lengths), strides, start, is_dense)
            outlines.append((name, memory, *layout, tensor.dtype, tensor.requires_grad))
        return cls((key, *outlines), inputs)


@dataclass(frozen=True)
class ReusablePlan:
    """A plan for later work with other tensors.

    `input_of` : the constants of the plan's recording, each with the name of the input that it was.
    """

    plan: StepPlan
    input_of: Mapping[Name, str]

    def function(self, inputs: Mapping[str, Tensor]) -> Callable[[], None]:
        """Return the function that repeats the plan's operations on these inputs."""
        return self.plan.function({constant: inputs[name] for constant, name in self.input_of.items()})


@dataclass(frozen=True)
class Repetition:
    """Repeats a recording."""

    recording: OperationRecorder
    plan: StepPlan
    again: Callable[[], None]

    def __call__(self) -> None:
        self.again()

    def reusable(self, inputs: Mapping[str, Tensor]) -> ReusablePlan | None:
        """Return the plan for later work; None if it uses tensors other than the inputs."""
        names = {id(tensor): name for name, tensor in inputs.items()}
        input_of = {}
        for constant, tensor in self.recording.constants.items():
            if id(tensor) not in names:
                return None
            input_of[constant] = names[id(tensor)]
        return ReusablePlan(self.plan, input_of)


class Replays:
    """Records the tensor operations of work twice, and repeats them if both recordings agree.

    Work that depends on anything else, such as a count that a loss keeps, is done as before. Tensors that the work uses
    must stay the same objects; their values may change. A plan is kept for each key, and later work of this key is
    repeated from the first time on.
    """

    recorded_steps = 2
    """How often work is done while it is recorded."""

    min_steps = 16
    """The fewest repetitions that are worth a recording of work that is not known yet."""

    def __init__(self) -> None:
        # Key -> its plan; None: the work was not recorded yet, or cannot be repeated.
        self._plans: OrderedDict[Hashable, ReusablePlan | None] = OrderedDict()
        self._failed: set[Hashable] = set()

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Do work twice; return a function that repeats its operations or, if it may do others, the work itself."""
        first = OperationRecorder()
        with first:
            work()
        second = OperationRecorder()
        with second:
            work()
        if not first.is_repeated_by(second):
            return work
        plan = plan_of(second)
        return Repetition(second, plan, plan.function(second.constants))

    def do(self, work: Callable[[], None], times: int, signature: StepSignature | None) -> bool:
        """See :class:`Recorder`. Work that is done often is recorded at once, other work when its key comes again."""
        if signature is not None:
            self._do_known(work, times, signature)
            return True

        again = work
        if times >= self.min_steps:
            again = self.record(work)
            times -= self.recorded_steps
        for _ in range(times):
            again()
        return True

    def _do_known(self, work: Callable[[], None], times: int, signature: StepSignature) -> None:
        key = signature.key
        is_new = key not in self._plans
        plan = self._plans.setdefault(key, None)
        self._plans.move_to_end(key)
        if len(self._plans) > MAX_PLANS:
            oldest, _ = self._plans.popitem(last=False)
            self._failed.discard(oldest)

        again = work
        if plan is not None:
            again = plan.function(signature.inputs)
        elif times >= (self.min_steps if is_new else self.recorded_steps) and key not in self._failed:
            again = self.record(work)
            times -= self.recorded_steps
            self._plans[key] = again.reusable(signature.inputs) if isinstance(again, Repetition) else None
            if self._plans[key] is None:
                self._failed.add(key)
        for _ in range(times):
            again()
