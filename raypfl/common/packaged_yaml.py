"""YAML files that come with the package, by name."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files

from raypfl.common.errors import ConfigError, did_you_mean


def is_file_name(source: str) -> bool:
    """Return whether `source` is the name of a YAML file; otherwise it is that of one in the package, or a setting."""
    return source.endswith((".yaml", ".yml"))


class Packaged:
    """The YAML files in a package's folder, iterated by name in alphabetical order. Each begins with a summary.

    Parameters
    ----------
    package : the full name of the package.
    kind : what messages call one of its files, in the singular.
    """

    def __init__(self, package: str, kind: str):
        self._folder = files(package)
        self._kind = kind

    def __iter__(self) -> Iterator[str]:
        file_names = [file.name for file in self._folder.iterdir()]
        return iter(sorted(name.removesuffix(".yaml") for name in file_names if name.endswith(".yaml")))

    def text(self, name: str) -> str:
        """Return the text of the file called `name`.

        Raises
        ------
        ConfigError : if there is no such file.
        """
        if name not in self:
            raise ConfigError(
                f"There is no {self._kind} called {name!r}; {did_you_mean(name, self)} "
                f"To run your own, give a file that ends in .yaml."
            )
        return (self._folder / f"{name}.yaml").read_text(encoding="utf-8")

    def summary(self, name: str) -> str:
        """Return the comment in the file's first line."""
        return self.text(name).partition("\n")[0].removeprefix("# ")
