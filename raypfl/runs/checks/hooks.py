"""Whether a method's class has the functions that the engine calls: their names, and what they take."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from types import FunctionType

from raypfl.common.errors import ConfigError
from raypfl.common.user_code import other_arguments, where_defined
from raypfl.experiment.checks.unread_options import names_reached
from raypfl.methods import Method

HOOKS = {
    name: tuple(inspect.signature(function).parameters)[1:]
    for name, function in vars(Method).items()
    if isinstance(function, FunctionType) and not name.startswith("_") and name != "has"
}
"""Function of a method that the engine calls -> the names of its arguments."""

MODEL_HOOKS = ("global_model", "personal_model", "unseen_model")
"""Functions of a method that make the evaluated models; a method defines at least one."""


def refuse_mistaken_hooks(method: Method) -> None:
    """Raise a ConfigError if a function of a method is missing, misspelt, or takes other arguments than it gets."""
    _refuse_misspelt(method)
    _refuse_missing(method)
    for name in HOOKS:
        if method.has(name):
            _refuse_other_arguments(method, name)


def _refuse_missing(method: Method) -> None:
    name = type(method).__name__
    if not method.has("start"):
        raise ConfigError(f"{name} does not say how it starts: define start(self, task).")
    if not method.has("round"):
        raise ConfigError(f"{name} does not say what a round is: define round(self, server, cohort).")
    if not any(method.has(hook) for hook in MODEL_HOOKS):
        raise ConfigError(
            f"{name} has no model to evaluate: define global_model(self, server), which returns a "
            "vector [P+B] such as server['theta'], or personal_model(self, clients, server), which returns [K, P+B], "
            "or both."
        )


def _refuse_other_arguments(method: Method, name: str) -> None:
    function = getattr(method, name)
    if not callable(function):
        raise ConfigError(
            f"{type(method).__name__}.{name} is {function!r}, but must be the function {_definition(name)}; call a "
            "hyperparameter by another name."
        )

    mistake = other_arguments(function, HOOKS[name])
    if mistake is not None:
        raise ConfigError(mistake)


def _refuse_misspelt(method: Method) -> None:
    """Raise a ConfigError for a function that nothing in the class calls, and whose name is almost that of another.

    The other is one that the engine calls or, in a class derived from a method of raypfl, that method's, such as
    FedAvg's ``train``.
    """
    called = names_reached(type(method))
    if "getattr" in called:  # perhaps by a name that is not in the code
        return

    arguments_of = dict(HOOKS)
    for owner in type(method).__mro__:
        if issubclass(owner, Method) and not _is_users(owner):
            arguments_of |= {
                name: tuple(inspect.signature(vars(owner)[name]).parameters)[1:] for name in _functions(owner)
            }

    for owner in filter(_is_users, type(method).__mro__):
        for name in sorted(_functions(owner) - called - arguments_of.keys()):
            nearest = difflib.get_close_matches(name, arguments_of, n=1, cutoff=0.8)
            if nearest and nearest[0] not in vars(owner):
                raise ConfigError(
                    f"{where_defined(getattr(method, name))} is never called; did you mean "
                    f"{_definition(nearest[0], arguments_of)}? If it has another purpose, give it a less similar name."
                )


def _is_users(owner: type) -> bool:
    return owner is not object and not owner.__module__.startswith("raypfl.")


def _functions(owner: type) -> set[str]:
    """Return the names of a class's own public functions."""
    names = vars(owner).items()
    return {name for name, value in names if isinstance(value, FunctionType) and not name.startswith("_")}


def _definition(name: str, arguments: Mapping[str, Sequence[str]] = HOOKS) -> str:
    return f"{name}({', '.join(('self', *arguments[name]))})"
