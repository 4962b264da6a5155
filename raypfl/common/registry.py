"""Names of the components of an experiment: methods, models, data sets, partitions."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from raypfl.common.errors import ConfigError, did_you_mean
from raypfl.common.user_code import traceback_text

T = TypeVar("T")

own: set[str] = set()
"""Modules of the user's own from which this process has components."""


class Registry:
    """Maps a name, or a ``module:attribute`` path of the user's own, to a class or function.

    Parameters
    ----------
    kind : what is registered, in the singular, as error messages say it (``"method"``).
    """

    def __init__(self, kind: str):
        self.kind = kind
        self._entries: dict[str, Callable[..., Any]] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator: register a class or function as `name`."""

        def add(entry: T) -> T:
            self._entries[name] = entry  # type: ignore[assignment]
            return entry

        return add

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def get(self, name: str) -> Callable[..., Any]:
        """The entry called `name`, or imported from ``module:attribute``.

        Raises
        ------
        ConfigError : if there is no such entry; the message names the nearest one.
        """
        if name in self._entries:
            return self._entries[name]
        if ":" in name:
            return self._import(name)
        raise ConfigError(f"There is no {self.kind} called {name!r}; {did_you_mean(name, self)}")

    def name_of(self, entry: object) -> str:
        """The name under which `entry` is registered, or its import path."""
        for name, known in self._entries.items():
            if known is entry:
                return name
        own.add(entry.__module__)
        return f"{entry.__module__}:{entry.__qualname__}"  # type: ignore[attr-defined]

    def summary(self, name: str) -> str:
        """First line of the entry's docstring."""
        return (inspect.getdoc(self._entries[name]) or "").partition("\n")[0]

    def _import(self, path: str) -> Callable[..., Any]:
        module, _, attribute = path.partition(":")
        try:
            imported = importlib.import_module(module)
        except Exception as error:
            if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
                raise ConfigError(
                    f"The {self.kind} {path!r} cannot be imported: {error}. "
                    f"Is the module's folder on PYTHONPATH, or the current folder?"
                ) from error
            raise ConfigError(
                f"The {self.kind} {path!r} cannot be imported, because its module raises an error:\n"
                f"{traceback_text(error)}"
            ) from error
        own.add(module)
        try:
            return getattr(imported, attribute)
        except AttributeError as error:
            raise ConfigError(
                f"The module {module!r} has no {attribute!r}, which {self.kind} {path!r} asks for."
            ) from error
