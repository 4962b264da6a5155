"""Whether a method's class has the functions that the engine calls: their names, and what they take."""

from __future__ import annotations

import difflib
import inspect
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
    """Raise a ConfigError for a function that nothing in the class calls, and whose name is almost a hook's."""
    called = names_reached(type(method))
    if "getattr" in called:  # perhaps by a name that is not in the code
        return

    owners = [owner for owner in type(method).__mro__ if not owner.__module__.startswith("raypfl.")]
    functions = {
        name
        for owner in owners
        for name, value in vars(owner).items()
        if isinstance(value, FunctionType) and not name.startswith("_")
    }
    for name in sorted(functions - called - HOOKS.keys()):
        nearest = difflib.get_close_matches(name, HOOKS, n=1, cutoff=0.8)
        if nearest and not any(nearest[0] in vars(owner) for owner in owners):
            raise ConfigError(
                f"{where_defined(getattr(method, name))} is called by nothing; did you mean "
                f"{_definition(nearest[0])}? A function for another purpose needs a name that is less like it."
            )


def _definition(hook: str) -> str:
    return f"{hook}({', '.join(('self', *HOOKS[hook]))})"
