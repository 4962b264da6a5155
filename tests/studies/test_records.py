"""Records of studies: what they hold, and what a person has written into them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raypfl.cli.actions.study import run_study
from raypfl.common.errors import ConfigError, RaypflError
from raypfl.runs.result import RunResult
from raypfl.studies.cells import plan
from raypfl.studies.description import load
from raypfl.studies.record import written_by_hand

STUDY = """\
seeds: 2
experiment:
  rounds: 11
  data: digits
  partition: {clients: 4}
  model: {name: mlp, hidden: [8]}
  evaluation: {every: 1}
  engine: {backend: inline}
  tracking: {mlflow: false}
methods:
  FedAvg: fedavg
  Local: local
metrics:
  GM: {protocol: global, model: global}
  best: {protocol: local, model: deployed, choose: test}
published:
  source: A paper, Table 4
  rows:
    FedAvg: [50.00 ± 1.00, –]
"""


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(STUDY)
    return tmp_path


def test_a_record_has_each_seeds_numbers_runs_and_costs_and_keeps_what_a_person_wrote(small: Path):
    file = small / "record.json"
    changes = ["rounds=10", f"output={small}/runs", f"data.cache={small}/cache/samples"]
    run_study("small.yaml", [], changes, quiet=True, as_json=True, record_file=file)
    record = json.loads(file.read_text())

    assert not record.keys() & {"search", "trials"}, "the study has no search"
    assert record["command"] == "raypfl study small.yaml rounds=10 data.cache=FOLDER"
    assert record["published"] == "A paper, Table 4" and record["smaller"] == ["rounds"]
    assert "rounds is 10, not 11." in record["deviations"]

    # Each number is what the run's own tables say.
    cells = plan(load("small.yaml")[0], changes)
    results = {(cell.method, cell.experiment.seed): RunResult.load(cell.folder) for cell in cells}
    by_round = {}
    for seed in (0, 1):
        result = results["FedAvg", seed]
        means = []
        for after in range(1, 11):
            rows = [row for row in result.summary(after) if (row["protocol"], row["model"]) == ("global", "global")]
            means.append(100 * rows[0]["accuracy"])
        by_round[seed] = means
    entry, best, local = record["entries"]
    assert (entry["method"], entry["metric"]) == ("FedAvg", "GM")
    assert entry["values"] == [round(by_round[seed][-1], 4) for seed in (0, 1)]
    assert entry["last_ten"] == [round(sum(by_round[seed]) / 10, 4) for seed in (0, 1)]
    assert (entry["published"], entry["published_spread"]) == (50.0, 1.0) and "published" not in best
    # A model that a method lacks has no entry, and a best round no last ten.
    assert (local["method"], local["metric"]) == ("Local", "best") and "last_ten" not in best
    # FedAvg alone has a global model, so there is none to compare it with.
    assert "standing" not in entry
    second = max(best, local, key=lambda entry: entry["standing"]["rank"])
    first = min(best, local, key=lambda entry: entry["standing"]["rank"])
    gap = sum(second["values"]) / 2 - sum(first["values"]) / 2
    assert second["standing"]["rank"] == 2 and second["standing"]["to_best"] == pytest.approx(gap, abs=1e-3)

    assert [(run["method"], run["seed"]) for run in record["runs"]] == [
        (cell.method, cell.experiment.seed) for cell in cells
    ]
    for run in record["runs"]:
        assert run["weights_hash"] == results[run["method"], run["seed"]].weights_hash
        assert run["rounds"] == 10 and run["cpu_seconds"] > 0

    record |= {"title": "Table 4", "reasons": ["Too few rounds."]}
    file.write_text(json.dumps(record))
    run_study("small.yaml", [], changes, quiet=True, as_json=True, record_file=file)
    assert json.loads(file.read_text()) == record


def test_another_file_is_not_taken_for_a_record(small: Path):
    (small / "package.json").write_text('{"name": "raypfl"}')
    with pytest.raises(ConfigError, match="holds no record of a study"):
        run_study("small.yaml", [], [], quiet=True, as_json=True, record_file=small / "package.json")
    assert not (small / "runs").exists() and written_by_hand(small / "none.json") == {}


def test_a_record_that_could_not_be_written_is_refused_before_anything_runs(small: Path):
    (small / "file").touch()
    for place, sentence in (
        (small, "holds no record"),
        (small / "file/record.json", "A file or folder of this name is in the way"),
    ):
        with pytest.raises(RaypflError, match=sentence):
            run_study("small.yaml", [], [], quiet=True, as_json=True, record_file=place)
    assert not (small / "runs").exists()


@pytest.mark.thorough
def test_a_record_grows_by_cells_of_another_machine_and_loses_no_run(small: Path):
    file = small / "record.json"
    changes = ["rounds=2"]
    run_study("small.yaml", ["fedavg"], [*changes, "output=here"], quiet=True, as_json=True, record_file=file)
    run_study("small.yaml", ["local"], [*changes, "output=there"], quiet=True, as_json=True)
    measured_before = file.read_text()
    with pytest.raises(ConfigError, match=r"has 2 runs that this command does not have \(FedAvg\)"):
        run_study("small.yaml", ["local"], [*changes, "output=there"], quiet=True, as_json=True, record_file=file)
    assert file.read_text() == measured_before

    for cell in (small / "there/cells").iterdir():
        cell.rename(small / "here/cells" / cell.name)
    hashes = {run["weights_hash"] for run in json.loads(measured_before)["runs"]}
    run_study("small.yaml", [], [*changes, "output=here"], quiet=True, as_json=True, record_file=file)
    record = json.loads(file.read_text())
    assert [run["method"] for run in record["runs"]] == ["FedAvg", "Local"] * 2
    assert hashes < {run["weights_hash"] for run in record["runs"]}
    assert all(run["cpu_seconds"] for run in record["runs"])
