"""Whether functions and networks of two runs compute the same from the same arguments."""

from __future__ import annotations

import dis
import types
from collections.abc import Mapping, Set
from dataclasses import fields, is_dataclass
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from raypfl.learning.loss import LocalLoss
from raypfl.learning.optimizers import Update
from raypfl.learning.packing.numbers import FUNCTIONS, NUMBERS, may_differ
from raypfl.learning.recording.python_state import names_in, with_nested
from raypfl.models.extras import Extras, Other
from raypfl.models.flat import FlatModel
from raypfl.models.parts import stored_tensors

PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size, slice)
"""Types whose values are compared with ``==``."""

TEMPLATE = frozenset({"module", "as_module", "factory"})
"""Names by which a loss would read the values that a network was built with, of which each run has its own."""

UPDATE = tuple(field.name for field in fields(Update))
"""The attributes of a local step."""

IN_EVERY_MODULE = frozenset(vars(nn.Module()))
"""What PyTorch keeps in every network: its parts, which are compared one by one, and its hooks."""


class Likeness:
    """Compares objects of two runs; objects of unknown types count as different.

    Each run has its own objects of some classes, such as the group of clients that a loss belongs to. Such a class
    names in ``_shared_by_runs`` the attributes that runs may share. Its objects are alike if the function that holds
    them reads only these attributes, and these are alike.
    """

    def __init__(self) -> None:
        # The networks are kept alive, so that no other one gets the id of a freed one.
        self._networks: dict[tuple[int, int], tuple[FlatModel, FlatModel, bool]] = {}

    def same_loss(self, a: LocalLoss, b: LocalLoss) -> bool:
        """Return whether two losses are the same function, except for floats in variables around it."""
        if not self.same_network(a.model, b.model) or a.penalty_is_separate != b.penalty_is_separate:
            return False
        return all(self._same_part_of_loss(getattr(a, name), getattr(b, name)) for name in FUNCTIONS)

    def _same_part_of_loss(self, a: Any, b: Any) -> bool:
        if isinstance(a, types.FunctionType) and isinstance(b, types.FunctionType):
            return self._same_function(a, b, floats_may_differ=True)
        return self._same_value(a, b, None)

    def same_update(self, a: Update, b: Update) -> bool:
        """Return whether two local steps follow the same rule; numbers that the optimizer takes by row may differ."""
        for name in UPDATE:
            values = (getattr(a, name), getattr(b, name))
            if not self._same_value(*values, None) and not (name in NUMBERS and may_differ(a.optimizer, *values)):
                return False
        return True

    def same_extras(self, a: Extras, b: Extras) -> bool:
        """Return whether two losses get extras of the same kinds; the numbers in tensors may differ."""
        if list(a) != list(b):
            return False
        return all(self._same_extra(a[name], b[name]) for name in a)

    def same_network(self, a: FlatModel, b: FlatModel) -> bool:
        """Return whether two networks are the same function of a model vector."""
        if a is b:
            return True
        pair = (id(a), id(b))
        if pair not in self._networks:
            self._networks[pair] = (a, b, self._compare_networks(a, b))
        return self._networks[pair][2]

    def _same_extra(self, a: Any, b: Any) -> bool:
        if isinstance(a, Other) and isinstance(b, Other):
            return self.same_network(a.model, b.model) and self._same_extra(a.theta, b.theta)
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            rows = int(type(a) is not Tensor)
            return type(a) is type(b) and a.dtype == b.dtype and a.shape[rows:] == b.shape[rows:]
        return self._same_value(a, b, None)

    def _compare_networks(self, a: FlatModel, b: FlatModel) -> bool:
        if a.segments != b.segments or (a.dtype, a.device) != (b.dtype, b.device):
            return False

        modules = list(a.module.modules())
        other_modules = list(b.module.modules())
        if len(modules) != len(other_modules):
            return False
        if not all(self._same_module(x, y) for x, y in zip(modules, other_modules, strict=True)):
            return False

        # Runs differ in their model vectors, but frozen tensors must be equal.
        tensors = stored_tensors(a.module)
        other_tensors = stored_tensors(b.module)
        fixed = tensors.keys() - a.segments.keys()
        return tensors.keys() == other_tensors.keys() and all(
            torch.equal(tensors[name], other_tensors[name]) for name in fixed
        )

    def _same_module(self, a: nn.Module, b: nn.Module) -> bool:
        if type(a) is not type(b):
            return False
        has_hooks = any(value for name, value in (*vars(a).items(), *vars(b).items()) if "hooks" in name)
        attributes = vars(a).keys() - IN_EVERY_MODULE
        if has_hooks or attributes != vars(b).keys() - IN_EVERY_MODULE:
            return False

        for name in attributes:
            value = vars(a)[name]
            refers_to_weights = name.startswith("_flat_weight")  # of recurrent layers
            if not refers_to_weights and not self._same_value(value, vars(b)[name], None):
                return False
        return True

    def _same_value(self, a: Any, b: Any, read: Set[str] | None) -> bool:
        """Compare two values.

        `read` : the attributes of the values that the function around them reads; None: it may use them in any way.
        """
        if a is b:
            return True
        if type(a) is not type(b):
            return False
        if isinstance(a, PLAIN):
            return bool(a == b)
        if isinstance(a, Tensor):
            return a.dtype == b.dtype and torch.equal(a, b)
        if isinstance(a, (list, tuple)):
            return len(a) == len(b) and all(self._same_value(x, y, None) for x, y in zip(a, b, strict=True))
        if isinstance(a, Mapping):
            return list(a) == list(b) and all(self._same_value(a[key], b[key], None) for key in a)
        if isinstance(a, FlatModel):
            return self.same_network(a, b)
        if isinstance(a, partial):
            return all(
                self._same_value(getattr(a, part), getattr(b, part), None) for part in ("func", "args", "keywords")
            )
        if isinstance(a, (types.FunctionType, types.MethodType)):
            return self._same_function(a, b)
        return self._same_object(a, b, read)

    def _same_object(self, a: Any, b: Any, read: Set[str] | None) -> bool:
        shared_by_runs: frozenset[str] = getattr(type(a), "_shared_by_runs", frozenset())
        if shared_by_runs:
            if read is None or not read <= shared_by_runs:
                return False
            return all(self._same_value(getattr(a, name), getattr(b, name), None) for name in sorted(read))

        names = _names_of_fields(a.__class__)
        if names is None or any(_further_attributes(value, names) for value in (a, b)):
            return False
        return all(self._same_value(getattr(a, name), getattr(b, name), None) for name in names)

    def _same_function(self, a: Any, b: Any, floats_may_differ: bool = False) -> bool:
        if isinstance(a, types.MethodType):
            function = a.__func__
            if function is not b.__func__ or not isinstance(function, types.FunctionType):
                return False
            self_name = function.__code__.co_varnames[0]
            same_owner = self._same_value(a.__self__, b.__self__, _attributes_read(function.__code__, self_name))
            return same_owner and self._same_function(function, function)

        code = a.__code__
        if code is not b.__code__ or a.__globals__ is not b.__globals__ or not TEMPLATE.isdisjoint(names_in(code)):
            return False
        defaults = [(function.__defaults__, function.__kwdefaults__) for function in (a, b)]
        if not self._same_value(defaults[0], defaults[1], None):
            return False

        cells = zip(code.co_freevars, a.__closure__ or (), b.__closure__ or (), strict=True)
        for name, cell, other_cell in cells:
            value = cell.cell_contents
            other_value = other_cell.cell_contents
            if floats_may_differ and type(value) is type(other_value) is float:
                continue
            if not self._same_value(value, other_value, _attributes_read(code, name)):
                return False
        return True


@cache
def _names_of_fields(kind: type) -> frozenset[str] | None:
    """Return the names of a dataclass's fields; None for another class."""
    return frozenset(field.name for field in fields(kind)) if is_dataclass(kind) else None


def _further_attributes(value: Any, names: Set[str]) -> set[str]:
    """Return the attributes of a dataclass's instance that are neither fields nor follow from them."""
    further = getattr(value, "__dict__", {}).keys() - names
    return {name for name in further if not isinstance(getattr(type(value), name, None), cached_property)}


@cache
def _attributes_read(code: types.CodeType, variable: str) -> Set[str] | None:
    """Return the attributes that code reads of a variable; None if it uses the variable in another way."""
    read: set[str] = set()
    for part in with_nested(code):
        instructions = list(dis.get_instructions(part))
        for instruction, following in zip(instructions, [*instructions[1:], None], strict=True):
            if instruction.argval != variable or instruction.opname in ("LOAD_CLOSURE", "MAKE_CELL"):
                continue
            is_loaded = instruction.opname in ("LOAD_DEREF", "LOAD_FAST", "LOAD_FAST_BORROW")
            if not is_loaded or following is None or following.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
                return None
            read.add(following.argval)
    return read
