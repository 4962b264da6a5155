"""The studies that come with the package, and what tests of their tables share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from raypfl.studies.cells import StudyCell, plan
from raypfl.studies.description import Study, load


@dataclass(frozen=True)
class ImageShape:
    """What `Prepared` reads of a data set of images to build a network; nothing is downloaded."""

    input_shape: tuple[int, int, int] = (3, 32, 32)
    num_classes: int = 10
    kind: str = "classes"


@cache
def study_of(name: str) -> Study:
    study, _ = load(name)
    return study


@cache
def cells_of(name: str) -> list[StudyCell]:
    """Every cell of a study; cached, since planning a study parses each cell's experiment."""
    return plan(study_of(name))
