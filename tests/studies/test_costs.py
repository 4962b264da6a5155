"""Columns of a study's table that count what runs spend: the cost of a target, and the score on a budget."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

import raypfl
from raypfl.common.errors import ConfigError
from raypfl.studies import running
from raypfl.studies.cells import StudyCell, plan, select
from raypfl.studies.description import Study, load
from raypfl.studies.record import RanStudy, record_of
from raypfl.studies.table.entries import TableEntry, entry_rows, table_entries
from raypfl.studies.table.formats import markdown
from raypfl.studies.table.layout import arrange
from raypfl.studies.table.picture import draw

ROUNDS = 5
GLOBAL = {"protocol": "local", "model": "global"}
STUDY = {
    "seeds": 2,
    "experiment": {
        "rounds": ROUNDS,
        "data": "digits",
        "partition": {"name": "dirichlet", "clients": 8, "alpha": 1.0},
        "cohort": {"size": 4},
        "devices": {"hardware": "lognormal"},
        "model": {"name": "mlp", "hidden": [8]},
        "evaluation": {"every": 1},
        "engine": {"backend": "inline"},
        "tracking": {"mlflow": False},
    },
    "methods": {
        "FedAvg": "fedavg",
        "FedBuff": {"name": "fedavg", "settings": {"asynchronous.buffer": 2}},
    },
    "metrics": {"score": GLOBAL},
}


def study_with(folder: Path, **metrics: dict) -> Study:
    file = folder / "costs.yaml"
    file.write_text(yaml.safe_dump(STUDY | {"metrics": metrics}))
    return load(str(file))[0]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[StudyCell], dict[int, raypfl.Result]]:
    folder = tmp_path_factory.mktemp("costs")
    cells = plan(study_with(folder, score=GLOBAL), [f"output={folder}"])
    running.run(cells, lambda cell, event: None)
    return cells, {i: raypfl.Result.load(cell.folder) for i, cell in enumerate(cells)}


def scores(result: raypfl.Result) -> list[float]:
    """Mean accuracy of the global model over clients after each round, in percent."""
    values = []
    for number in range(1, ROUNDS + 1):
        for row in result.summary(number):
            if (row["protocol"], row["model"]) == ("local", "global"):
                values.append(100 * row["accuracy"])
    return values


def seconds(result: raypfl.Result) -> list[float]:
    """Simulated seconds until the end of each round."""
    return [row["simulated_time"] for row in result.rounds.to_pylist()]


def by_method(entries: list[TableEntry], metric: str) -> dict[str, TableEntry]:
    return {entry.method: entry for entry in entries if entry.metric == metric}


def test_a_column_is_what_each_seed_spends_until_a_target_or_how_good_it_is_on_a_budget(tmp_path: Path, runs):
    cells, results = runs
    target = min(max(scores(result)[:3]) for result in results.values())
    budget = max(seconds(result)[1] for result in results.values())
    study = study_with(
        tmp_path,
        time=GLOBAL | {"cost": "simulated_seconds", "target": target - 1e-9},
        rounds=GLOBAL | {"cost": "round", "target": target - 1e-9},
        score=GLOBAL | {"cost": "simulated_seconds", "budget": budget},
    )
    entries = table_entries(study, study, cells, results)

    for method in STUDY["methods"]:
        first_rounds = []
        times = []
        within = []
        for i, result in results.items():
            if cells[i].method == method:
                first = next(k for k, score in enumerate(scores(result)) if score >= target - 1e-9)
                first_rounds.append(first + 1)
                times.append(seconds(result)[first])
                ends = [k for k, end in enumerate(seconds(result)) if end <= budget]
                within.append(scores(result)[ends[-1]])

        assert by_method(entries, "rounds")[method].values == tuple(first_rounds)
        assert by_method(entries, "time")[method].values == pytest.approx(times)
        assert by_method(entries, "score")[method].values == pytest.approx(within)
        assert by_method(entries, "time")[method].label == "simulated seconds"
        assert by_method(entries, "time")[method].standing is None and by_method(entries, "score")[method].standing
    assert draw(entries, "costs", tmp_path / "table.png").exists()


def test_a_target_that_a_seed_never_reached_has_no_mean_and_says_so(tmp_path: Path, runs):
    cells, results = runs
    best = {
        cells[i].experiment.seed: max(scores(result)) for i, result in results.items() if cells[i].method == "FedAvg"
    }
    study = study_with(tmp_path, time=GLOBAL | {"cost": "simulated_seconds", "target": max(best.values()) - 1e-9})

    entries = table_entries(study, study, cells, results)
    entry = by_method(entries, "time")["FedAvg"]
    assert len(set(best.values())) == 2 and (entry.never, len(entry.values)) == (1, 1)
    assert entry.mean is None and entry.over_seeds is None
    row = entry_rows(entries)[0]
    assert (row["measured"], row["never_seeds"], row["seeds"]) == (None, 1, 1)
    assert "| FedAvg | 1 of 2 never |" in markdown(arrange(study, None, entries, []))

    record = record_of(RanStudy(study, study, cells, cells, cells, results, None), [], entries, [], [])
    assert record["entries"][0]["never"] == 1 and len(record["entries"][0]["values"]) == 1


def test_a_method_without_the_model_of_a_target_has_no_number_and_did_not_fail_to_reach_it(tmp_path: Path, runs):
    cells, results = runs
    study = study_with(tmp_path, rounds={"protocol": "local", "model": "personal", "cost": "round", "target": 1})
    entries = table_entries(study, study, cells, results)
    assert [(entry.values, entry.never) for entry in entries] == [((), 0)] * 2
    assert "| FedAvg | – |" in markdown(arrange(study, None, entries, []))


def test_a_column_of_some_blocks_has_no_numbers_in_the_others(tmp_path: Path, runs):
    cells, results = runs
    metrics = {"everywhere": GLOBAL, "there": GLOBAL | {"down": ["first"]}}
    file = tmp_path / "blocks.yaml"
    file.write_text(yaml.safe_dump(STUDY | {"metrics": metrics, "down": {"first": {}, "second": {}}}))
    study, _ = load(str(file))
    in_blocks = [replace(cell, down=("first", "second")[cell.experiment.seed]) for cell in cells]

    entries = table_entries(study, study, in_blocks, results)
    measured = {(entry.down, entry.metric) for entry in entries if entry.values}
    ranked = {(entry.down, entry.metric) for entry in entries if entry.standing}
    assert measured == ranked == {("first", "everywhere"), ("first", "there"), ("second", "everywhere")}


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"target": 90}, r"metrics.time.target needs metrics.time.cost"),
        ({"cost": "round"}, r"metrics.time.cost needs either a target"),
        ({"cost": "round", "target": 90, "budget": 4}, r"metrics.time.cost needs either a target"),
        ({"cost": "round", "target": 90, "last": 2}, r"metrics.time.last has no effect with a target"),
        ({"cost": "round", "budget": 4, "choose": "test"}, r"metrics.time.choose has no effect with a budget"),
    ],
)
def test_a_cost_without_meaning_is_refused(tmp_path: Path, keys: dict, sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        study_with(tmp_path, time=GLOBAL | keys)


def test_simulated_time_needs_devices(tmp_path: Path):
    study = study_with(tmp_path, time=GLOBAL | {"cost": "kilojoules", "target": 90})
    with pytest.raises(ConfigError, match=r"metric time counts kilojoules, but FedAvg · seed 0 has no devices"):
        plan(select(study, ["FedAvg"]), ["devices.hardware=null"])
