"""Experiments that come with the package, by name."""

from __future__ import annotations

from raypfl.shelf import Shelf

RECIPES = Shelf(__name__, "recipe")
