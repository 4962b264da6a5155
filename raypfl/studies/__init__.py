"""Studies: tables of results, measured cell by cell and laid beside published ones."""

from __future__ import annotations

from raypfl.shelf import Shelf

STUDIES = Shelf(__name__, "study")
