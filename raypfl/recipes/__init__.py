"""Experiments that come with the package, by name."""

from __future__ import annotations

from raypfl.common.packaged import Packaged

RECIPES = Packaged(__name__, "recipe")
