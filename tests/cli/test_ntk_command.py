"""`raypfl ntk` runs a recipe if need be, and says why training converges or does not."""

from __future__ import annotations

import json
import shutil

import pytest

import raypfl
from raypfl.cli.actions.ntk import ntk
from raypfl.common.errors import ConfigError
from tests.analysis.test_flntk import two_layer
from tests.support.runs import experiment


@pytest.mark.thorough
def test_a_recipe_is_run_and_its_findings_stand_under_labels_before_the_suggestions(tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    file.write_text(two_layer(tmp_path).to_yaml())

    ntk(str(file), ["rounds=3", "training.steps=2", "seeds=3"], quiet=True, as_json=False)

    findings, suggestions = capsys.readouterr().out.split("Try next")
    assert "unmet  eta_local: 0.2, needs <=" in findings and "met    length of inputs" in findings
    assert "rounds to 10% of the squared error, by the kernel at the start" in findings
    assert "limits convergence" in findings
    assert {f"fedavg, seed {seed}" for seed in range(3)} <= set(findings.splitlines())
    assert "raypfl run" not in suggestions and "seeds=3" not in suggestions, "this is what was just done"


def test_a_run_of_any_network_is_analysed_and_shown_again_from_its_folder(tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    file.write_text(experiment(tmp_path, method="fedavg", rounds=1).to_yaml())
    ntk(str(file), [], quiet=True, as_json=True)
    first = json.loads(capsys.readouterr().out)
    [findings] = first.values()
    diagnosis = findings["ntk"]["diagnosis"]
    assert diagnosis["sentence"].startswith("In round 1") and diagnosis["largest"] > 0

    [folder] = (tmp_path / "runs").iterdir()
    ntk(str(folder), [], quiet=True, as_json=True)
    assert json.loads(capsys.readouterr().out) == first

    ntk(str(folder), [], quiet=True, as_json=False)
    assert capsys.readouterr().out == f"fedavg, seed 0\n  {diagnosis['sentence']}\n\n"


@pytest.mark.thorough
def test_a_finished_run_is_analysed_at_its_checkpoints_with_the_kernels_that_it_had(tmp_path, capsys):
    """The kernel before the first local step is that of the global model after the round before."""
    settings = {"method": "fedavg", "rounds": 3, "cohort__size": 12, "checkpoint__every": 1, "checkpoint__keep": 2}
    analysed = raypfl.run(experiment(tmp_path, **settings).replace(analyses=[{"name": "ntk", "every": 1}]))
    plain = raypfl.run(experiment(tmp_path, **settings))
    assert plain.weights_hash == analysed.weights_hash

    ntk(str(plain.run_dir), [], quiet=True, as_json=True)
    [findings] = json.loads(capsys.readouterr().out).values()
    first, last = findings["checkpoints"]
    assert (first["round"], last["round"]) == (2, 3) and "drift" not in first
    logged = {(row["round"], row["name"]): row["value"] for row in analysed.logged.to_pylist()}
    for name in ("largest", "largest_share", "least", "between"):
        assert first[name] == pytest.approx(logged[3, f"ntk_{name}"], rel=1e-4, abs=1e-4)
    assert last["nonlinear"] == pytest.approx(logged[3, "ntk_nonlinear"], rel=1e-4)

    ntk(str(analysed.run_dir), ["analyses=[{name: ntk, probe: 24, sketch: 100000}]"], quiet=True, as_json=False)
    text = capsys.readouterr().out
    assert "after round 3" in text and "least" not in text and "differs from the linear one by " in text


def test_a_run_that_cannot_be_analysed_is_refused_with_what_to_do(tmp_path):
    plain = raypfl.run(experiment(tmp_path, rounds=1))
    with pytest.raises(ConfigError, match="neither the folder of a run"):
        ntk(str(tmp_path), [], quiet=True, as_json=False)
    with pytest.raises(ConfigError, match="cannot change, except analyses="):
        ntk(str(plain.run_dir), ["rounds=3"], quiet=True, as_json=False)

    shutil.rmtree(plain.run_dir / "checkpoints")
    with pytest.raises(ConfigError, match=r"none of its checkpoints is left. Run it again with 'analyses=\[ntk\]'"):
        ntk(str(plain.run_dir), [], quiet=True, as_json=False)

    alone = raypfl.run(experiment(tmp_path, rounds=1, method="local"))
    with pytest.raises(ConfigError, match="Local has no global model whose kernel"):
        ntk(str(alone.run_dir), [], quiet=True, as_json=False)
