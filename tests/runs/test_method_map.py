"""The map of methods: what each keeps, sends and needs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from raypfl.methods import METHODS
from raypfl.runs.choices.method_map import Needs, markdown, needs_of

PAGE = Path(__file__).parents[2] / "docs/methods.md"


def test_what_methods_keep_send_and_need_is_measured_in_their_rounds():
    needs = needs_of(["fedavg", "local", "scaffold", "feddbe"])
    assert needs["fedavg"] == Needs(state_size=0, traffic=1, exchanges=1, calls_everyone=False)
    assert needs["local"] == Needs(state_size=1, traffic=0, exchanges=1, calls_everyone=False)
    assert needs["scaffold"] == Needs(state_size=1, traffic=2, exchanges=1, calls_everyone=False)

    # Its features' bias stays; all clients measure the consensus before the first round.
    assert 0 < needs["feddbe"].state_size < 0.1
    assert needs["feddbe"].exchanges == 2 and needs["feddbe"].calls_everyone


def test_the_map_names_every_method_in_one_family_and_in_one_group_of_each_size():
    names = re.findall(r"`([\w-]+)`", PAGE.read_text().partition("method_map")[2].partition("\n## ")[0])
    assert {name: names.count(name) for name in METHODS if names.count(name) < 3} == {}


@pytest.mark.slow
def test_the_page_has_the_map_and_its_table_says_which_methods_keep_nothing():
    needs = needs_of(METHODS)
    page = PAGE.read_text()
    assert markdown(needs) in page

    rows = re.findall(r"^\| `([\w-]+)` \| ([^|]*)\|", page, re.MULTILINE)
    says_nothing = {name for name, keeps in rows if keeps == "" or keeps.startswith("nothing")}
    # This network has no batch norm, which is what FedBN keeps.
    assert says_nothing | {"fedbn"} == {name for name in METHODS if not needs[name].state_size}
