"""Experiments that come with the package, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from raypfl.common.packaged import Packaged

RECIPES = Packaged(__name__, "recipe")


def settings_of(recipe: str) -> dict[str, Any]:
    """The settings of a recipe, by its name, or of a file ending in ``.yaml`` or ``.yml``, whose name is the file's."""
    from raypfl.experiment.yaml_text import read  # late: a list of recipes needs no YAML

    if not recipe.endswith((".yaml", ".yml")):
        return read(RECIPES.text(recipe))
    return {"name": Path(recipe).stem, **read(Path(recipe))}
