"""YAML files that come with the package, by name."""

from __future__ import annotations

from importlib.resources import files

from raypfl.common.errors import ConfigError, did_you_mean


class Shelf:
    """The YAML files beside a package's ``__init__``, each of which says in its first line, a comment, what it is.

    Parameters
    ----------
    package : whose files they are. kind : what they are called, in the singular.
    """

    def __init__(self, package: str, kind: str):
        self._package, self._kind = package, kind

    def names(self) -> list[str]:
        """All names, sorted."""
        found = files(self._package).iterdir()
        return sorted(file.name.removesuffix(".yaml") for file in found if file.name.endswith(".yaml"))

    def text(self, name: str) -> str:
        """The YAML text called `name`.

        Raises
        ------
        ConfigError : if there is none.
        """
        if name not in self.names():
            raise ConfigError(
                f"There is no {self._kind} called {name!r}; {did_you_mean(name, self.names())} "
                f"To run one of your own, give a file that ends in .yaml."
            )
        return (files(self._package) / f"{name}.yaml").read_text(encoding="utf-8")

    def summary(self, name: str) -> str:
        """Its first line, which is a comment that says what it is."""
        return self.text(name).partition("\n")[0].removeprefix("# ")
