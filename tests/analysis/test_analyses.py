"""An analysis sees every model before every local step, and changes no bit of the run."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import raypfl
from raypfl.analysis import Observation
from raypfl.analysis.base import load_observations
from raypfl.common.errors import ConfigError, MethodError, RaypflError
from raypfl.results.display import outcome
from tests.support.runs import Interrupt, experiment, same_tables

ANALYSES = "tests.support.observing_analyses:"


def observed(tmp_path: Path, name: str = "RecordsSteps", every: int = 2, **changes) -> raypfl.Experiment:
    return experiment(tmp_path, **changes).replace(analyses=[{"name": ANALYSES + name, "every": every}])


def observations(result: raypfl.Result, round: int, client: int) -> list[Observation]:
    return list(load_observations(result.run_dir / "analyses/RecordsSteps", round, client))


@pytest.mark.parametrize("method", ["fedavg", "ditto", "apfl"])
@pytest.mark.parametrize("executor", ["sequential", "vectorised"])
def test_a_run_has_the_same_bits_and_messages_with_an_analysis(tmp_path, method, executor):
    settings = {
        "method": method,
        "engine__executor": executor,
        "rounds": 2,
        "model": f"{ANALYSES}dropping",
        "training__smallest_batch": 2,
    }
    settings |= {"training__epochs": 1, "partition__clients": 4, "cohort__size": 3}
    plain = raypfl.run(experiment(tmp_path, **settings))
    observed_run = raypfl.run(observed(tmp_path, **settings))

    assert plain.weights_hash == observed_run.weights_hash and same_tables(plain, observed_run)

    client = observed_run.rounds["cohort"][1].as_py()[0]
    trainings = {observation.training for observation in observations(observed_run, 2, client)}
    assert trainings == set(range(1 if method == "fedavg" else 2))


def test_the_models_before_each_step_are_those_that_training_passes_through(tmp_path):
    settings = {
        "method": "fedavg",
        "rounds": 2,
        "training__steps": 3,
        "training__batch_size": 8,
        "engine__group_size": 1,
    }
    observed_run = raypfl.run(observed(tmp_path, **settings))
    shorter = raypfl.run(experiment(tmp_path, **settings | {"training__steps": 2, "cohort__size": 1, "rounds": 1}))
    client = shorter.rounds["cohort"][0].as_py()[0]
    clients = observed_run.rounds["cohort"][1].as_py()
    steps = {c: observations(observed_run, 2, c) for c in clients}

    assert observations(observed_run, 1, clients[0]) == []

    first = steps[clients[0]][0].arrays
    for client_steps in steps.values():
        assert [step.step for step in client_steps] == [0, 1, 2]
        assert all(np.array_equal(step.arrays["start"], first["theta"]) for step in client_steps)

    assert all(len(step.arrays["batch"]) == 8 for step in steps[clients[0]])
    assert not np.array_equal(steps[clients[0]][1].arrays["theta"], first["theta"])

    # The model after two of three steps is what a run with two steps ends with.
    short_observed = raypfl.run(observed(tmp_path, every=1, **settings | {"rounds": 1, "cohort__size": 1}))
    assert np.allclose(
        observations(short_observed, 1, client)[2].arrays["theta"], shorter.global_model().numpy(), rtol=1e-5, atol=1e-7
    )


def test_the_logs_of_an_analysis_and_of_the_method_are_in_the_same_tables(tmp_path):
    logs = {"method": "tests.support.federated_methods:Logs", "method__marks": tmp_path}
    result = raypfl.run(observed(tmp_path, **logs, rounds=4, cohort__size=3))
    values = {(row["round"], row["name"]) for row in result.logged.to_pylist()}
    assert {(0, "norm"), (2, "steps"), (4, "moved"), (1, "norm")} <= values and (3, "steps") not in values
    assert set(result.analysis) == {"segments", "steps"}


def test_a_stopped_and_resumed_run_keeps_the_same_files(tmp_path):
    whole = raypfl.run(observed(tmp_path))
    stopped = raypfl.run(observed(tmp_path), listeners=[Interrupt(3)])
    resumed = raypfl.resume(stopped.run_dir)
    assert resumed.weights_hash == whole.weights_hash and resumed.logged.equals(whole.logged)

    def contents(run_dir: Path) -> dict[Path, bytes]:
        return {file.relative_to(run_dir): file.read_bytes() for file in run_dir.rglob("client-*")}

    assert len(contents(whole.run_dir)) == 18 and contents(whole.run_dir) == contents(resumed.run_dir)
    assert not [p for p in whole.run_dir.glob("checkpoints/**/*") if "client-" in p.name]


def test_mistakes_are_reported_with_their_place(tmp_path):
    with pytest.raises(
        RaypflError, match=r"(?s)FailsInStep.before_step \(observing_analyses.py, line \d+\) failed before step 0"
    ):
        raypfl.run(observed(tmp_path, "FailsInStep"))
    with pytest.raises(RaypflError, match=r"KeepsOnSelf.last cannot be set: an analysis keeps nothing between calls"):
        raypfl.run(observed(tmp_path, "KeepsOnSelf", every=1))
    with pytest.raises(
        RaypflError, match=r"FailsAfterRound.after_round .* failed after round 2: ValueError: this cannot be"
    ):
        raypfl.run(observed(tmp_path, "FailsAfterRound"))
    with pytest.raises(ConfigError, match="names the same analysis twice"):
        experiment(tmp_path).replace(analyses=[ANALYSES + "RecordsSteps", ANALYSES + "RecordsSteps"])
    with pytest.raises(ConfigError, match="must be a list of names"):
        experiment(tmp_path).replace(analyses=3)

    with pytest.raises(ConfigError, match="There is no analysis called 'ntkk'"):
        experiment(tmp_path).replace(analyses=["ntkk"])


def test_the_summary_of_an_analysis_is_printed_or_why_it_failed(tmp_path):
    result = raypfl.run(experiment(tmp_path, rounds=1).replace(analyses=[ANALYSES + "WritesSummary"]))
    assert outcome.findings(result) == ["1 round"]
    shutil.rmtree(result.run_dir / "analyses")
    [message] = outcome.findings(result)
    assert re.match(r"WritesSummary.summary \(observing_analyses.py, line \d+\) failed: FileNotFoundError", message)


def test_a_failing_analysis_leaves_the_run_at_the_round_before(tmp_path):
    with pytest.raises(RaypflError):
        raypfl.run(observed(tmp_path, "FailsAfterRound"))
    [folder] = (tmp_path / "runs").iterdir()
    one_round = raypfl.run(experiment(tmp_path, rounds=1))
    assert raypfl.Result.load(folder).weights_hash == one_round.weights_hash


def test_the_analysis_in_the_documentation_runs(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs/analyses.md").read_text()
    (tmp_path / "my_analyses.py").write_text(re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[0])
    monkeypatch.syspath_prepend(tmp_path)
    described = re.findall(r"^analyses: (.*)$", page, re.MULTILINE)[0]
    result = raypfl.run(experiment(tmp_path, analyses=described, checkpoint__every=5))
    values = {(row["round"], row["name"]): row["value"] for row in result.logged.to_pylist()}
    assert values[5, "drift"] > 0 and (6, "drift") in values and len(result.analysis["drift"]) == 12


def test_experiments_with_analyses_are_described_and_read_again(tmp_path):
    settings = observed(tmp_path)
    assert settings.analyses[0].every == 2 and raypfl.Experiment.from_yaml(settings.to_yaml()) == settings
    with pytest.raises(MethodError):
        settings.analyses[0].every = 3
    assert torch.is_tensor(raypfl.run(settings.replace(rounds=1)).global_model())
