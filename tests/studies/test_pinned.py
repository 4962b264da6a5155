"""Studies and recipes keep the settings that decide their results, and studies the numbers that papers print.

If a default changes, finished cells of a study run again, and its record is of other settings than the study describes.
"""

from __future__ import annotations

import hashlib
import json
from itertools import product
from pathlib import Path

import pytest

from raypfl.experiment import experiments
from raypfl.experiment.recipes import RECIPES, settings_of
from raypfl.studies import STUDIES
from raypfl.studies.cells import identity, plan
from tests.support.studies import study_of
from tests.support.tiers import with_quick

PINNED = json.loads((Path(__file__).parent / "pinned.json").read_text())
"""Study or recipe -> its digest."""


@pytest.fixture(autouse=True)
def _same_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of weights is in the current folder, and its path is a setting."""
    monkeypatch.chdir("/")


def digest(described: object) -> str:
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:12]


def digest_of_study(name: str) -> str:
    study = study_of(name)
    cells = [[*cell.position, identity(cell.experiment)] for cell in plan(study)]
    metrics = [[heading, repr(metric)] for heading, metric in study.metrics.items()]
    places = product(study.methods, study.down or [""], study.across or [""], study.metrics)
    printed = [[*place, repr(study.quoted(*place))] for place in places]
    return digest([cells, metrics, printed])


def test_every_study_and_recipe_is_pinned():
    assert PINNED["studies"].keys() == set(STUDIES) and PINNED["recipes"].keys() == set(RECIPES)


@pytest.mark.parametrize("name", with_quick(STUDIES, {"digits-personal", "fednh-table1"}))
def test_a_study_keeps_the_settings_that_decide_its_results_and_the_numbers_of_its_paper(name: str):
    assert digest_of_study(name) == PINNED["studies"][name], "if this is on purpose, its record is to be measured again"


@pytest.mark.parametrize("name", with_quick(RECIPES, {"digits", "pefll-paper"}))
def test_a_recipe_keeps_the_settings_that_decide_its_results(name: str):
    runs = [identity(experiment) for experiment in experiments(settings_of(name))]
    assert digest(runs) == PINNED["recipes"][name], "if this is on purpose, pages with its results are to be changed"
