"""Labels tell runs apart, whichever of them comes first."""

from __future__ import annotations

import itertools

import pytest

from raypfl.experiment import Experiment
from raypfl.integrations.tracking.entries import run_name
from raypfl.methods import FedAvg
from raypfl.results.labels import differing_settings, labels

RULES = [None, "median", {"name": "krum", "select": 14, "fraction": 0.3}]
SELECTIONS = [{"size": 5}, {"size": 5, "selection": "oort"}]


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_a_run_without_a_component_has_another_label_than_runs_with_one_in_any_order(order):
    compared = [Experiment(method="fedavg", aggregation=rule) for rule in RULES]
    compared.append(Experiment(method="ditto", aggregation=RULES[2]))
    assert len(set(labels([compared[i] for i in order]))) == 4


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_a_selection_of_clients_is_told_from_none_in_any_order(order):
    compared = [Experiment(method="fedavg", cohort=cohort) for cohort in SELECTIONS]
    compared.append(Experiment(method="ditto", cohort={"size": 5, "selection": {"name": "oort", "exploration": 0.5}}))
    assert len(set(labels([compared[i] for i in order]))) == 3


def test_a_run_that_has_not_begun_has_the_label_of_one_that_has_recorded_its_datas_objective():
    run_that_began = Experiment(objective="classification")
    waiting_run = Experiment(method="ditto")
    assert labels([run_that_began, waiting_run]) == ["fedavg", "ditto"]


def test_a_list_in_a_label_has_no_quotes():
    compared = [Experiment(), Experiment(evaluation={"protocols": ["global", "local"]})]
    assert labels(compared)[1] == "fedavg evaluation.protocols=[global, local]"


def test_when_a_run_is_evaluated_is_in_its_label_only_if_nothing_else_tells_it_apart():
    often = Experiment(evaluation={"every": 1})
    rarely = Experiment(evaluation={"every": 2})
    assert labels([often, rarely.replace(method="ditto")]) == ["fedavg", "ditto"]
    assert labels([often, rarely]) == ["fedavg evaluation.every=1", "fedavg evaluation.every=2"]


class Base(FedAvg):
    """A method with the name of another module's class."""


def test_classes_of_one_name_are_told_apart_by_their_modules_in_labels_and_in_mlflow():
    names = [f"{__name__}:Base", "tests.support.mistaken_methods:Base", "fedavg"]
    compared = [Experiment(method=name) for name in names]
    assert labels(compared) == names
    tracked = [run_name(run, settings=text) for run, text in zip(compared, differing_settings(compared), strict=True)]
    assert tracked == [f"Base s0 method={names[0]}", f"Base s0 method={names[1]}", "fedavg s0 method=fedavg"]
    assert differing_settings([compared[0], compared[2]]) == ["", ""], "nothing is to be told apart"
