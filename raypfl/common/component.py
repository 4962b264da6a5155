"""The base class of an experiment's components: methods, objectives, metrics, optimizers, analyses."""

from __future__ import annotations

import copyreg
import difflib
import inspect
import re
from dataclasses import MISSING, FrozenInstanceError, dataclass
from types import FunctionType
from typing import Any, ClassVar, dataclass_transform

from raypfl.common.errors import ConfigError
from raypfl.common.limits import limit_violations
from raypfl.common.user_code import other_arguments, where_defined

# A class of a script or notebook is sent to Ray's processes by value, and its fields with it. Unpickled, the mark of a
# field without a default would be another object than the one that dataclasses compare it with.
copyreg.pickle(type(MISSING), lambda mark: "MISSING")


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Component:
    """A class whose subclasses become frozen dataclasses by themselves; their fields are options of an experiment.

    Attributes
    ----------
    section : the experiment's section, which precedes an option's name in messages (``"method."``).
    """

    section: ClassVar[str] = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            options = list(inspect.signature(cls.__init__).parameters)[1:] or ["lam"]
            raise ConfigError(
                f"{cls.__name__} has an __init__; its options are fields of the class, as in: {options[0]}: float = 0.1"
            )
        docstring = cls.__doc__
        try:
            dataclass(frozen=True, kw_only=True)(cls)
        except ValueError as error:
            raise _mutable_default(cls, error) or error from None
        # A class without a docstring would get its signature for one.
        cls.__doc__ = docstring
        # Component's freeze it, too. Python would not replace these by those of a user's own @dataclass(frozen=True).
        del cls.__setattr__, cls.__delattr__

    def __setattr__(self, name: str, value: Any = None) -> None:
        raise self._assignment_error(name)

    __delattr__ = __setattr__

    def _assignment_error(self, name: str) -> Exception:
        return FrozenInstanceError(f"cannot change field {name!r}")

    def __post_init__(self) -> None:
        """Raise a ConfigError for an option outside its limits, or a function that takes other arguments."""
        mistakes = [f"{self.section}{violation}." for violation in limit_violations(self)]
        mistakes += _mistaken_functions(self)
        if mistakes:
            raise ConfigError(" ".join(mistakes))


def _mutable_default(cls: type, error: ValueError) -> ConfigError | None:
    """Return what to write instead if a dataclass was refused for a list, a dict or a set as a default, or None."""
    refused = re.search(r"mutable default .* for field (\w+)", str(error))
    if not refused:
        return None
    name = refused[1]
    default = vars(cls)[name]
    kind = type(default).__name__
    factory = f"lambda: {default!r}" if default else kind
    return ConfigError(
        f"{cls.__name__}.{name} has the default {default!r}, which all objects of the class would share; write "
        f"{name}: {kind} = dataclasses.field(default_factory={factory})."
    )


def _mistaken_functions(component: Component) -> list[str]:
    """Return a sentence for each function whose arguments differ from those of the abstract one that it defines."""
    mistakes = []
    for owner in type(component).__mro__:
        for name, function in vars(owner).items():
            if isinstance(function, FunctionType) and getattr(function, "__isabstractmethod__", False):
                names = list(inspect.signature(function).parameters)[1:]
                mistake = other_arguments(getattr(component, name), names)
                if mistake is not None:
                    mistakes.append(mistake)
    return mistakes


def abstract_functions(entry: Any) -> str:
    """Return the functions that a class still has to define, separated by commas; empty if there are none."""
    abstract_names = sorted(getattr(entry, "__abstractmethods__", ()))
    if not abstract_names:
        return ""  # it may be no class, and have no attributes

    functions = {name: value for name, value in vars(entry).items() if isinstance(value, FunctionType)}
    descriptions = []
    for name in abstract_names:
        nearest = difflib.get_close_matches(name, functions, n=1, cutoff=0.8)
        misspelt = f" (did you mean it by {where_defined(functions[nearest[0]])}?)" if nearest else ""
        descriptions.append(name + misspelt)
    return ", ".join(descriptions)
