"""Recipes: experiments that come with the package, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from raypfl.common.packaged_yaml import Packaged

RECIPES = Packaged(__name__, "recipe")


def settings_of(recipe: str) -> dict[str, Any]:
    """Read the settings of a recipe by its name, or of a file ending in ``.yaml`` or ``.yml``, named after the file."""
    # A list of recipes needs no YAML.
    from raypfl.experiment.yaml_text import read

    if not recipe.endswith((".yaml", ".yml")):
        return read(RECIPES.text(recipe))
    return {"name": Path(recipe).stem, **read(Path(recipe))}
