"""FL-NTK on the engine: FedAvg of a two-layer network is predicted, observed and explained."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import raypfl
from raypfl.analysis.base import load_observations
from raypfl.analysis.flntk import CURVES, DIAGNOSIS, KERNELS, REPORT, TERMS, observed_errors
from raypfl.analysis.theory.kernels import asymmetry, infinite_width
from raypfl.analysis.theory.two_layer import TwoLayer
from raypfl.common.errors import RaypflError
from raypfl.data import ClientData
from raypfl.engine.events import Event, Warned
from tests.support.ntk import Problem, fl_round, simulate, sphere
from tests.support.runs import Interrupt


def two_layer(folder: Path, **changes) -> raypfl.Experiment:
    (folder / "data").mkdir(exist_ok=True)
    x = sphere(32, 8)
    np.save(folder / "data/inputs.npy", 3 * x.numpy())
    np.save(folder / "data/targets.npy", torch.tanh(3 * x[:, 0]).numpy())
    base = raypfl.Experiment(
        rounds=6,
        analyses=[{"name": "flntk", "kernels_every": 3}],
        data={"name": "arrays", "root": str(folder / "data"), "test_fraction": 0.25, "cache": str(folder / "cache")},
        partition={"name": "label_sorted", "clients": 4},
        model={"name": "two_layer", "width": 512},
        method={"name": "fedavg", "weighting": "uniform", "server_lr": 1.3},
        objective={"name": "regression", "reduction": "sum"},
        training={"steps": 3, "batch_size": 100, "lr": 0.2, "precision": "fp64"},
        engine={"backend": "inline"},
        tracking={"mlflow": False},
        output=str(folder / "runs"),
    )

    return base.override([f"{k.replace('__', '.')}={v}" for k, v in changes.items()])


def load_data(result: raypfl.Result) -> ClientData:
    settings = result.experiment
    return settings.load_data()


def analysis_folder(result: raypfl.Result) -> Path:
    return result.run_dir / "analyses/flntk"


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> raypfl.Result:
    return raypfl.run(two_layer(tmp_path_factory.mktemp("flntk")))


@pytest.fixture(scope="module")
def problem(result) -> tuple[Problem, list[torch.Tensor]]:
    """The problem of the run, and each client's rows, for the simulation in plain torch."""
    data = load_data(result)
    indices = [data.indices(c, "train") for c in range(4)]
    everybody = np.concatenate(indices)
    x = torch.from_numpy((data.inputs[everybody] - data.mean) / data.std).double()
    x = x / x.norm(dim=1, keepdim=True)
    y = torch.from_numpy(data.labels[everybody]).double()
    parts = torch.arange(len(y)).split([len(client_indices) for client_indices in indices])

    kernels = load_file(analysis_folder(result) / KERNELS)
    return Problem(x, y, TwoLayer(kernels["signs"]), kernels["first"]), list(parts)


def test_the_engines_rounds_are_those_of_the_algorithm(result, problem):
    p, parts = problem
    errors, u = simulate(p, parts, 3, 0.2, 6, server_rate=1.3)
    assert torch.allclose(result.global_model().view_as(u), u, atol=1e-12)
    observed = observed_errors(analysis_folder(result), 6)
    assert [observed[t] for t in range(7)] == pytest.approx(errors.square().sum(1).tolist(), rel=1e-10)


def test_clients_are_observed_before_each_step_of_chosen_rounds(result, problem):
    p, parts = problem
    simulated, _ = fl_round(p, p.u, parts, 3, 0.2, 1.3)
    assert {int(file.parent.name[6:]) for file in analysis_folder(result).rglob("client-*")} == {1, 3, 6}

    observations = [list(load_observations(analysis_folder(result), 1, c)) for c in range(4)]
    assert [[observation.step for observation in steps] for steps in observations] == [[0, 1, 2]] * 4

    for part, steps in zip(parts, observations, strict=True):
        for k, observation in enumerate(steps):
            bits = np.unpackbits(observation.arrays["active"], axis=1, count=512).astype(bool)
            assert np.array_equal(bits, simulated.active[k][part].numpy())
            assert np.allclose(observation.arrays["outputs"], simulated.local[k][part], atol=1e-12)

    values = {(row["round"], row["name"]): row["value"] for row in result.logged.to_pylist()}
    assert values[1, "flntk_asymmetry"] == pytest.approx(asymmetry(simulated.kernel(2)).fraction, rel=1e-9)
    assert values[1, "flntk_effective_eigenvalue"] == pytest.approx(simulated.effective_eigenvalue, rel=1e-9)

    total = sum(asdict(simulated.terms()).values())
    error = float(simulated.error.square().sum())
    whole = ("flntk_descent", "flntk_unstable_kernel", "flntk_unstable_output", "flntk_second_order")
    assert sum(values[1, name] for name in whole) == pytest.approx(total / error, rel=1e-9)


def test_the_run_is_predicted_before_it_begins_and_explained_in_a_sentence(result, problem):
    report, diagnosis = (json.loads((analysis_folder(result) / name).read_text()) for name in (REPORT, DIAGNOSIS))
    observed = observed_errors(analysis_folder(result), 6)
    curves = load_file(analysis_folder(result) / CURVES)

    assert curves["frozen"].tolist() == pytest.approx(list(observed.values()), rel=0.05)
    assert torch.allclose(
        load_file(analysis_folder(result) / KERNELS)["infinite"], infinite_width(problem[0].x), atol=1e-6
    )

    on_rates = [condition for condition in report["conditions"] if condition["name"].startswith("eta")]
    assert report["rounds"] >= report["predicted_rounds"]
    assert not any(condition["met"] for condition in on_rates)

    assert diagnosis["rounds"] == report["predicted_rounds"] and str(diagnosis["rounds"]) in diagnosis["sentence"]
    assert [row["name"] for row in result.images.to_pylist()] == ["flntk", "flntk_rounds"]


@pytest.mark.thorough
def test_the_recommended_change_saves_the_predicted_rounds(result, tmp_path):
    diagnosis = json.loads((analysis_folder(result) / DIAGNOSIS).read_text())
    name, _, value = diagnosis["change"].rpartition(" ")
    setting = {
        "a local rate of": "training__lr",
        "a number of local steps of": "training__steps",
        "a server's rate of": "method__server_lr",
    }[name]
    rounds = diagnosis["changed"][diagnosis["change"]] + 1
    changed_run = raypfl.run(two_layer(tmp_path, rounds=rounds, **{setting: value}))
    observed = observed_errors(analysis_folder(changed_run), rounds)
    reached = next(t for t, error in observed.items() if error <= 0.1 * observed[0])

    assert abs(reached - diagnosis["changed"][diagnosis["change"]]) <= 1
    assert reached < (diagnosis["observed"] or diagnosis["rounds"])


def test_the_terms_of_observed_rounds_are_kept_for_the_picture(result):
    observed = observed_errors(analysis_folder(result), 6)
    for t in (1, 3, 6):
        terms = json.loads((analysis_folder(result) / f"round-{t:06d}" / TERMS).read_text())
        assert len(terms) == 4
        assert sum(terms.values()) == pytest.approx(observed[t] / observed[t - 1] - 1, rel=1e-6)


def test_untrained_signs_are_not_reported_as_frozen_random_weights(tmp_path):
    events: list[Event] = []
    raypfl.run(two_layer(tmp_path, rounds=1), listeners=[events.append])
    assert not [event for event in events if isinstance(event, Warned)]


@pytest.mark.thorough
def test_an_interrupted_run_has_the_same_files_as_a_whole_one(tmp_path):
    changes = {"checkpoint__every": 2}
    whole = raypfl.run(two_layer(tmp_path, **changes))
    stopped = raypfl.run(two_layer(tmp_path, **changes), listeners=[Interrupt(3)])
    resumed = raypfl.resume(stopped.run_dir)

    def contents(folder: Path) -> dict[Path, bytes]:
        return {file.relative_to(folder): file.read_bytes() for file in folder.rglob("*") if file.is_file()}

    assert contents(analysis_folder(whole)) == contents(analysis_folder(resumed)) != {}


@pytest.mark.thorough
def test_a_run_that_is_resumed_with_more_rounds_is_predicted_to_its_new_end(tmp_path, result):
    short = raypfl.run(two_layer(tmp_path, rounds=2))
    resumed = raypfl.resume(short.run_dir, overrides=["rounds=6"])
    folder = analysis_folder(resumed)

    assert (folder / CURVES).read_bytes() == (analysis_folder(result) / CURVES).read_bytes()
    assert (folder / DIAGNOSIS).read_bytes() == (analysis_folder(result) / DIAGNOSIS).read_bytes()
    predicted = [row for row in resumed.logged.to_pylist() if row["name"] in ("flntk_predicted", "flntk_bound")]
    assert predicted == [row for row in result.logged.to_pylist() if row["name"] in ("flntk_predicted", "flntk_bound")]


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({"model": "{name: mlp}"}, "model: two_layer"),
        ({"objective__reduction": "mean"}, "reduction: sum"),
        ({"method__weighting": "samples"}, "weighting: uniform"),
        ({"training__batch_size": 3}, "batch_size: 6 or more"),
        ({"training__momentum": 0.9}, "without momentum"),
        ({"cohort__size": 2}, "all clients take part"),
        ({"attack": "sign_flip"}, "no attack"),
        ({"devices__hardware": "lognormal", "devices__partial_work": 0.5}, "no devices.partial_work"),
    ],
)
def test_settings_outside_the_theory_are_refused_with_those_that_it_needs(tmp_path, changes, needed):
    with pytest.raises(RaypflError, match=f"needs other settings than these: [^;]*{needed}"):
        raypfl.run(two_layer(tmp_path, **changes))


def test_samples_sorted_by_their_targets_go_to_clients_in_equal_parts(result):
    data = load_data(result)
    targets = []
    for client in range(4):
        indices = np.concatenate([data.indices(client, "train"), data.indices(client, "test")])
        targets.append(data.labels[indices])

    assert [len(client_targets) for client_targets in targets] == [8] * 4
    assert all(a.max() <= b.min() for a, b in pairwise(targets))


def test_paired_units_begin_with_outputs_of_zero(tmp_path):
    run = raypfl.run(two_layer(tmp_path, model__paired="true", rounds=1))
    data = load_data(run)
    y = np.concatenate([data.labels[data.indices(c, "train")] for c in range(4)])
    assert observed_errors(analysis_folder(run), 1)[0] == pytest.approx(float(np.square(y).sum()), rel=1e-10)


@pytest.mark.parametrize("name", ["inputs.npy", "targets.npy"])
def test_arrays_that_are_missing_or_are_not_numbers_are_refused(tmp_path, name):
    settings = two_layer(tmp_path)
    np.save(tmp_path / "data" / name, np.array([["a"]]))
    with pytest.raises(RaypflError, match=rf"{name} holds <U1\[1, 1\], not .*in floating point"):
        raypfl.run(settings)
    (tmp_path / "data" / name).unlink()
    with pytest.raises(RaypflError, match=f"There is no {name}"):
        raypfl.run(settings)
