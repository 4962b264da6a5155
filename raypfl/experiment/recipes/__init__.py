"""Recipes: experiments that come with the package, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from raypfl.common.errors import ConfigError
from raypfl.common.packaged_yaml import Packaged, is_file_name

RECIPES = Packaged(__name__, "recipe")


def settings_of(recipe: str) -> dict[str, Any]:
    """Read the settings of a recipe by its name, or of a file ending in ``.yaml`` or ``.yml``, named after the file."""
    # Imported only here: listing the recipes needs no YAML.
    from raypfl.experiment.checks.file_kinds import refuse_other_kind
    from raypfl.experiment.yaml_text import read

    if not is_file_name(recipe):
        _refuse_component(recipe)
        return read(RECIPES.text(recipe))
    values = read(Path(recipe))
    refuse_other_kind(values, recipe, "experiment")
    return {"name": Path(recipe).stem, **values}


def _refuse_component(recipe: str) -> None:
    """Raise a ConfigError if the name is that of a method, say, and of no recipe."""
    if recipe in RECIPES:
        return
    # Imported only here: listing the recipes needs none of them.
    from raypfl.data.datasets import DATASETS
    from raypfl.data.partitions import PARTITIONS
    from raypfl.methods import METHODS
    from raypfl.models import MODELS

    for setting, names in {"method": METHODS, "data": DATASETS, "model": MODELS, "partition": PARTITIONS}.items():
        if recipe in names:
            raise ConfigError(f"There is no recipe called {recipe!r}, but a {names.kind}: set {setting}={recipe}.")

    file = Path(recipe)
    if file.suffix in (".csv", ".tsv", ".parquet"):
        raise ConfigError(
            f"{recipe} is not a recipe; train on a table by data=table data.root={recipe} data.target=COLUMN."
        )
    if file.suffix == ".py":
        raise ConfigError(
            f"{recipe} is not a recipe; name a method of your own by module and class: --method {file.stem}:ClassName."
        )
