"""Experiments that come with the package, by name."""

from __future__ import annotations

from importlib.resources import files

from raypfl.errors import ConfigError, did_you_mean


def names() -> list[str]:
    """Names of all recipes, sorted."""
    return sorted(file.name.removesuffix(".yaml") for file in files(__name__).iterdir() if file.name.endswith(".yaml"))


def text(name: str) -> str:
    """A recipe's YAML text.

    Raises
    ------
    ConfigError : if there is no such recipe.
    """
    if name not in names():
        raise ConfigError(
            f"There is no recipe called {name!r}; {did_you_mean(name, names())} "
            f"To run an experiment of your own, give a file that ends in .yaml."
        )
    return (files(__name__) / f"{name}.yaml").read_text(encoding="utf-8")


def summary(name: str) -> str:
    """A recipe's first line, which is a comment that says what it is."""
    return text(name).partition("\n")[0].removeprefix("# ")
