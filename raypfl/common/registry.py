"""Names of the components of an experiment: methods, models, data sets, partitions."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoints, entry_points
from pathlib import Path, PurePath
from typing import Any, TypeVar

from raypfl.common.errors import ConfigError, did_you_mean
from raypfl.common.user_code import traceback_text

T = TypeVar("T")

user_modules: set[str] = set()
"""The user's own modules from which this process has components."""


def docstring_of(entry: Any) -> str:
    """Return the docstring of a function or class; empty if it has none of its own, though its base class has one."""
    docstring = vars(entry).get("__doc__") if isinstance(entry, type) else entry.__doc__
    return inspect.cleandoc(docstring or "")


class Registry:
    """Maps a name, or the ``module:attribute`` path of a user's component, to a class or function.

    Installed packages add names by entry points of the group ``raypfl.methods`` (``.models``, ``.datasets``, ...). The
    entry registered as ``timm:NAME`` is a function that gets the name after ``timm:`` and returns the component.

    Parameters
    ----------
    kind : what the entries are, in the singular, as error messages say it (``"method"``).
    hint : returns a sentence on what an unknown name may mean, or an empty text.
    plural : the group's name after ``raypfl.``; empty: that of the kind, with an s.
    """

    def __init__(self, kind: str, hint: Callable[[str], str] = lambda name: "", plural: str = ""):
        self.kind = kind
        self._hint = hint
        self.group = f"raypfl.{plural or kind.replace(' ', '') + 's'}"
        self._entries: dict[str, Callable[..., Any]] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that registers a class or function as `name`."""

        def add(entry: T) -> T:
            self._entries[name] = entry  # type: ignore[assignment]
            return entry

        return add

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries.keys() | self._installed().names))

    def __contains__(self, name: str) -> bool:
        return name in self._entries or name in self._installed().names

    def get(self, name: str) -> Callable[..., Any]:
        """Return the entry called `name`: raypfl's, an installed package's, or that imported from ``module:attribute``.

        Raises
        ------
        ConfigError : if there is no such entry; the message names the nearest one.
        """
        if name in self._entries:
            return self._entries[name]

        family, colon, member = name.partition(":")
        if f"{family}:NAME" in self._entries:
            return self._entries[f"{family}:NAME"](member)
        if colon:
            return self._import(name)
        if name in self._installed().names:
            return self._load(name)
        raise ConfigError(f"There is no {self.kind} called {name!r}; {self._instead_of(name)}")

    def name_of(self, entry: object) -> str:
        """Return the name under which `entry` is registered, or its import path."""
        for name, registered in self._entries.items():
            if registered is entry:
                return name
        user_modules.add(entry.__module__)
        return f"{entry.__module__}:{entry.__qualname__}"  # type: ignore[attr-defined]

    def summary(self, name: str) -> str:
        """Return the first line of the entry's docstring."""
        return docstring_of(self.get(name)).partition("\n")[0]

    def _instead_of(self, name: str) -> str:
        """Suggest what an unknown name may mean."""
        if "," in name and all(part.strip() in self for part in name.split(",")):
            several = " Compare methods by --method A,B." if self.kind == "method" else ""
            return f"name one, not several.{several}"
        if name.endswith(".py") or Path(f"{name}.py").is_file():
            return f"did you mean '{_module_of(name)}:ClassName'? A class of your own is named by module and class."
        module, _, attribute = name.rpartition(".")
        if module and Path(f"{module.replace('.', '/')}.py").is_file():
            return f"did you mean '{module}:{attribute}'?"
        suggestion = self._hint(name) or did_you_mean(name, self)
        if suggestion.endswith("?"):
            return suggestion
        # No registered name is similar, so the name may be that of the user's own component.
        return f"{suggestion} One of your own is named by module and class, as in my_module:MyClass."

    @property
    def _families(self) -> list[str]:
        return [name.removesuffix(":NAME") for name in self._entries if name.endswith(":NAME")]

    def _installed(self) -> EntryPoints:
        return _entry_points(self.group, tuple(sys.path))

    def _load(self, name: str) -> Callable[..., Any]:
        """Load an installed package's entry and register it."""
        (point, *_) = self._installed().select(name=name)
        try:
            self._entries[name] = point.load()
        except Exception as error:
            package = point.dist.name if point.dist else point.value
            raise ConfigError(
                f"The {self.kind} {name!r} of the package {package} cannot be imported ({point.value}): "
                f"{type(error).__name__}: {error}. Install another version of the package, or uninstall it."
            ) from error
        return self._entries[name]

    def _import(self, path: str) -> Callable[..., Any]:
        module, _, attribute = path.partition(":")
        if module.endswith(".py"):
            name = _module_of(module)
            raise ConfigError(f"The {self.kind} {path!r} names a file; write the module's name: {name}:{attribute}.")

        try:
            imported = importlib.import_module(module)
        except Exception as error:
            # Also if a package around the module is missing, but not if the module's own imports are.
            is_missing = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")
            if not is_missing:
                raise ConfigError(
                    f"The {self.kind} {path!r} cannot be imported, because its module raises an error:\n"
                    f"{traceback_text(error)}"
                ) from error

            families = difflib.get_close_matches(module, self._families)
            if families:
                suggestion = f"{families[0]}:{attribute}"
                raise ConfigError(f"There is no {self.kind} called {path!r}; did you mean {suggestion!r}?") from None
            nearest = difflib.get_close_matches(module, _modules_beside(module), n=1, cutoff=0.8)
            hint = f"Did you mean '{nearest[0]}:{attribute}'?" if nearest else ""
            raise ConfigError(
                f"The {self.kind} {path!r} cannot be imported: {error}. "
                f"{hint or 'Is the folder of the module on PYTHONPATH, or the current folder?'}"
            ) from error

        user_modules.add(module)
        try:
            return getattr(imported, attribute)
        except AttributeError as error:
            names = [name for name, value in vars(imported).items() if callable(value) and not name.startswith("_")]
            hint = did_you_mean(attribute, names) if names else "it has no class or function."
            if module == "__main__" and not hint.endswith("?"):
                hint = (
                    "no other process can import what a script or notebook defines. Save it in a module, such as "
                    f"my_file.py, and name it 'my_file:{attribute}'."
                )
            raise ConfigError(
                f"The module {module!r} has no {attribute!r}, which the {self.kind} {path!r} names; {hint}"
            ) from error


def _modules_beside(module: str) -> list[str]:
    """Return the modules that can be imported from where `module` would be."""
    package, dot, _ = module.rpartition(".")
    try:
        folders = importlib.import_module(package).__path__ if package else None
    except (ImportError, AttributeError):
        return []
    return [f"{package}{dot}{sibling.name}" for sibling in pkgutil.iter_modules(folders)]


def _module_of(file: str) -> str:
    return ".".join(PurePath(file.removesuffix(".py")).parts)


@functools.cache
def _entry_points(group: str, _path: tuple[str, ...]) -> EntryPoints:
    """Return the entry points of a group, read once for each search path: `_path` is only part of the cache's key."""
    return entry_points(group=group)
