"""Studies: tables of results, measured cell by cell and laid beside published ones."""

from __future__ import annotations

from raypfl.common.packaged import Shelf

STUDIES = Shelf(__name__, "study")
