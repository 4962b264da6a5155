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
    free_axes : input -> an axis along which it is only indexed, so that its length may differ.
    """

    key: Hashable
    inputs: Mapping[str, Tensor]
    free_axes: Mapping[str, int]

    @classmethod
    def of(cls, key: Hashable, inputs: Mapping[str, Tensor], free_axes: Mapping[str, int]) -> StepSignature:
        """Add to a key how the inputs lie in memory; parameters are as the attributes."""
        number_of_memory: dict[int, int] = {}
        outlines: list[Hashable] = []
        for name, tensor in inputs.items():
            memory = number_of_memory.setdefault(tensor.untyped_storage().data_ptr(), len(number_of_memory))
            lengths = list(tensor.shape)
            order: Hashable = tensor.stride()
            if name in free_axes:
                del lengths[free_axes[name]]
                order = tensor.is_contiguous()
            layout = (tuple(lengths), order, tensor.storage_offset())
            outlines.append((name, memory, *layout, tensor.dtype, tensor.requires_grad))
        return cls((key, *outlines), inputs, free_axes)


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


@dataclass
class KnownWork:
    """What is known of work with one key.

    Attributes
    ----------
    first : the operations of its first recording, and the inputs that were their constants.
    plan : the plan to repeat, from the second recording on.
    may_repeat : whether every recording so far may be repeated.
    """

    first: tuple[Hashable, Mapping[Name, str]] | None = None
    plan: ReusablePlan | None = None
    may_repeat: bool = True

    def record(self, work: Callable[[], None], inputs: Mapping[str, Tensor]) -> None:
        """Do work once while it is recorded."""
        recording = OperationRecorder()
        with recording:
            work()

        names = {id(tensor): name for name, tensor in inputs.items()}
        constants = recording.constants
        input_of = {constant: names[id(tensor)] for constant, tensor in constants.items() if id(tensor) in names}
        recorded = (recording.key, input_of)
        uses_inputs_only = len(input_of) == len(constants)
        self.may_repeat = recording.is_repeatable and uses_inputs_only and self.first in (None, recorded)
        if self.may_repeat and self.first is not None:
            self.plan = ReusablePlan(plan_of(recording), input_of)
        self.first = recorded


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
        self._known: OrderedDict[Hashable, KnownWork] = OrderedDict()

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
        return plan_of(second).function(second.constants)

    def do(self, work: Callable[[], None], times: int, signature: StepSignature | None) -> bool:
        """See :class:`Recorder`. Work that is done often is recorded at once, other work when its key comes again."""
        if signature is None:
            return self._do_unknown(work, times)

        # Taken out and put back at the end.
        earlier = self._known.pop(signature.key, None)
        known_work = earlier or KnownWork()
        self._known[signature.key] = known_work
        if len(self._known) > MAX_PLANS:
            self._known.popitem(last=False)

        # The two recordings of short work, of a single step for instance, are made one at a time.
        is_worth_recording = times >= self.min_steps or earlier is not None
        while is_worth_recording and times and known_work.may_repeat and known_work.plan is None:
            known_work.record(work, signature.inputs)
            times -= 1
        if times and known_work.plan is not None:
            self._repeat(known_work.plan, signature, times)
        else:
            for _ in range(times):
                work()
        return True

    def _do_unknown(self, work: Callable[[], None], times: int) -> bool:
        """Do work without a signature this many `times`; see :meth:`Recorder.do`."""
        again = work
        if times >= self.min_steps:
            again = self.record(work)
            times -= self.recorded_steps
        for _ in range(times):
            again()
        return True

    def _repeat(self, plan: ReusablePlan, signature: StepSignature, times: int) -> None:
        """Repeat a plan on a signature's inputs."""
        again = plan.function(signature.inputs)
        for _ in range(times):
            again()
