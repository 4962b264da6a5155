"""The inputs of a graph, which reads and writes the same memory each time."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor

from raypfl.learning.recording.replays import StepSignature
from raypfl.models.rows import ALIGNMENT

Inputs = Mapping[str, Tensor]


@dataclass(eq=False)
class _Block:
    """Memory for one input, or for inputs that share theirs.

    Attributes
    ----------
    name : one of the inputs.
    start : the position in its own memory where the block begins.
    numbers : the block: ``[n]``, or a tensor of the input's shape but for `axis`.
    axis : the axis along which the block has room for a longer input than the present one; None: there is none.
    is_changed : whether steps change the numbers.
    """

    name: str
    start: int
    numbers: Tensor
    axis: int | None = None
    is_changed: bool = False

    def pair(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Return the numbers here, and the same ones of the inputs."""
        tensor = inputs[self.name].detach()
        if self.axis is not None:
            return self.numbers.narrow(self.axis, 0, tensor.shape[self.axis]), tensor
        return self.numbers, tensor.as_strided((len(self.numbers),), (1,), self.start)


class GraphInputs:
    """Memory for the inputs of a graph's steps; those that share memory share it here, too.

    `rooms` : memory that graphs share, by input, since they are replayed one after the other, each on new copies.

    Attributes
    ----------
    tensors : the graph's inputs, by name.
    """

    def __init__(self, signature: StepSignature, rooms: MutableMapping[Hashable, Tensor]):
        self.tensors: dict[str, Tensor] = {}
        self._blocks: list[_Block] = []
        # References to all that is in use; `rooms` may have only weak ones.
        self._rooms: list[Tensor] = []
        by_memory: dict[int, dict[str, Tensor]] = {}
        for name, tensor in signature.inputs.items():
            if name in signature.free_axes:
                self._add_with_room(name, tensor.detach(), signature.free_axes[name], rooms)
            elif not tensor.numel():
                self.tensors[name] = tensor.detach().clone()
            else:
                by_memory.setdefault(tensor.untyped_storage().data_ptr(), {})[name] = tensor.detach()
        for sharing in by_memory.values():
            self._add(sharing, rooms)

    def _add_with_room(self, name: str, tensor: Tensor, axis: int, rooms: MutableMapping[Hashable, Tensor]) -> None:
        shape = list(tensor.shape)
        # Up to twice as much as now, so that few rounds are too long for it.
        shape[axis] = 1 << (shape[axis] - 1).bit_length()
        key = (name, tensor.dtype, *shape)
        room = rooms.get(key)
        if room is None:
            # Positions beyond the inputs are never read.
            room = rooms[key] = tensor.new_zeros(shape)
        self.tensors[name] = room
        self._blocks.append(_Block(name, 0, room, axis))

    def _add(self, sharing: Mapping[str, Tensor], rooms: MutableMapping[Hashable, Tensor]) -> None:
        start = min(int(tensor.storage_offset()) for tensor in sharing.values())
        stop = max(_end(tensor) for tensor in sharing.values())
        name, first = next(iter(sharing.items()))
        # Addresses stay as even as they were: kernels for aligned numbers may round differently.
        lead = start % (ALIGNMENT // first.element_size())
        length = lead + stop - start
        key = (name, first.dtype)
        room = rooms.get(key)
        if room is None or len(room) < length:
            room = rooms[key] = first.new_empty(length)
        self._rooms.append(room)
        numbers = room[lead:length]
        for shared_name, tensor in sharing.items():
            offset = lead + tensor.storage_offset() - start
            self.tensors[shared_name] = numbers.as_strided(tensor.shape, tensor.stride(), offset)
        self._blocks.append(_Block(name, start, numbers))

    def have_room(self, inputs: Inputs) -> bool:
        """Return whether these inputs fit into the memory."""
        return all(
            inputs[block.name].shape[block.axis] <= block.numbers.shape[block.axis]
            for block in self._blocks
            if block.axis is not None
        )

    def load(self, inputs: Inputs) -> None:
        """Copy inputs to the graph's memory."""
        pairs = [block.pair(inputs) for block in self._blocks]
        with torch.no_grad():
            torch._foreach_copy_(
                [block_numbers for block_numbers, _ in pairs], [input_numbers for _, input_numbers in pairs]
            )

    def note_changes(self, steps: Callable[[], None]) -> None:
        """Take steps, and note which inputs they change."""
        versions = [block.numbers._version for block in self._blocks]
        steps()
        for block, version in zip(self._blocks, versions, strict=True):
            block.is_changed = block.numbers._version != version

    def store(self, inputs: Inputs) -> None:
        """Copy what steps have changed back to the inputs."""
        pairs = [block.pair(inputs) for block in self._blocks if block.is_changed]
        with torch.no_grad():
            torch._foreach_copy_(
                [input_numbers for _, input_numbers in pairs], [block_numbers for block_numbers, _ in pairs]
            )


def _end(tensor: Tensor) -> int:
    """Return the position behind the last number of a tensor in its memory."""
    lengths = zip(tensor.shape, tensor.stride(), strict=True)
    return int(tensor.storage_offset()) + 1 + sum((length - 1) * stride for length, stride in lengths)
