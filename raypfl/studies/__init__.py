"""Studies: tables of results, measured cell by cell and compared with published ones."""

from __future__ import annotations

from raypfl.common.packaged_yaml import Packaged

STUDIES = Packaged(__name__, "study")
