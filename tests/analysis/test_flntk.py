"""FL-NTK on the engine: FedAvg of a two-layer network is predicted, observed and explained."""

from __future__ import annotations

import json
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
from raypfl.data import ClientData, load_federated
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


def opened(result: raypfl.Result) -> ClientData:
    made = result.experiment
    return load_federated(made.data, made.partition, seed=made.seed)


def files(result: raypfl.Result) -> Path:
    return result.run_dir / "analyses/flntk"


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> raypfl.Result:
    return raypfl.run(two_layer(tmp_path_factory.mktemp("flntk")))


@pytest.fixture(scope="module")
def problem(result) -> tuple[Problem, list[torch.Tensor]]:
    """The run's own problem, for the simulation in plain torch."""
    data = opened(result)
    where = [data.indices(c, "train") for c in range(4)]
    x = torch.from_numpy(np.concatenate([(data.inputs[w] - data.mean) / data.std for w in where])).double()
    y = torch.from_numpy(np.concatenate([data.labels[w] for w in where])).double()
    kept = load_file(files(result) / KERNELS)
    return Problem(x / x.norm(dim=1, keepdim=True), y, TwoLayer(kept["signs"]), kept["first"]), list(
        torch.arange(len(y)).split([len(w) for w in where])
    )


def test_the_engines_rounds_are_those_of_the_algorithm(result, problem):
    p, parts = problem
    errors, u = simulate(p, parts, 3, 0.2, 6, server_rate=1.3)
    assert torch.allclose(result.global_model().view_as(u), u, atol=1e-12)
    observed = observed_errors(files(result), 6)
    assert [observed[t] for t in range(7)] == pytest.approx(errors.square().sum(1).tolist(), rel=1e-10)


def test_clients_are_observed_before_each_step_of_chosen_rounds(result, problem):
    p, parts = problem
    one, _ = fl_round(p, p.u, parts, 3, 0.2, 1.3)
    assert {int(f.parent.name[6:]) for f in files(result).rglob("client-*")} == {1, 3, 6}
    kept = [list(load_observations(files(result), 1, c)) for c in range(4)]
    assert [[s.step for s in steps] for steps in kept] == [[0, 1, 2]] * 4
    for part, steps in zip(parts, kept, strict=True):
        for k, seen in enumerate(steps):
            bits = np.unpackbits(seen.arrays["active"], axis=1, count=512).astype(bool)
            assert np.array_equal(bits, one.active[k][part].numpy())
            assert np.allclose(seen.arrays["outputs"], one.local[k][part], atol=1e-12)
    values = {(r["round"], r["name"]): r["value"] for r in result.logged.to_pylist()}
    assert values[1, "flntk_asymmetry"] == pytest.approx(asymmetry(one.kernel(2)).fraction, rel=1e-9)
    assert values[1, "flntk_effective_eigenvalue"] == pytest.approx(one.effective_eigenvalue, rel=1e-9)
    terms, error = one.terms(), float(one.error.square().sum())
    whole = ("flntk_descent", "flntk_unstable_kernel", "flntk_unstable_output", "flntk_second_order")
    assert sum(values[1, n] for n in whole) == pytest.approx(terms.total / error, rel=1e-9)


def test_the_run_is_predicted_before_it_begins_and_explained_in_a_sentence(result, problem):
    told, found = (json.loads((files(result) / name).read_text()) for name in (REPORT, DIAGNOSIS))
    observed, curves = observed_errors(files(result), 6), load_file(files(result) / CURVES)
    assert curves["frozen"].tolist() == pytest.approx(list(observed.values()), rel=0.05)
    assert torch.allclose(load_file(files(result) / KERNELS)["infinite"], infinite_width(problem[0].x), atol=1e-6)
    assert told["rounds"] >= told["predicted_rounds"] and not any(
        c["met"] for c in told["conditions"] if c["name"].startswith("eta")
    )
    assert found["rounds"] == told["predicted_rounds"] and str(found["rounds"]) in found["sentence"]
    assert [row["name"] for row in result.images.to_pylist()] == ["flntk", "flntk_rounds"]


def test_the_change_that_a_run_names_saves_as_many_rounds_as_it_says(result, tmp_path):
    found = json.loads((files(result) / DIAGNOSIS).read_text())
    name, _, value = found["change"].rpartition(" ")
    setting = {
        "a local rate of": "training__lr",
        "a number of local steps of": "training__steps",
        "a server's rate of": "method__server_lr",
    }[name]
    rounds = found["changed"][found["change"]] + 1
    observed = observed_errors(files(raypfl.run(two_layer(tmp_path, rounds=rounds, **{setting: value}))), rounds)
    reached = next(t for t, error in observed.items() if error <= 0.1 * observed[0])
    assert abs(reached - found["changed"][found["change"]]) <= 1 and reached < (found["observed"] or found["rounds"])


def test_the_terms_of_observed_rounds_are_kept_for_the_picture(result):
    observed = observed_errors(files(result), 6)
    for t in (1, 3, 6):
        terms = json.loads((files(result) / f"round-{t:06d}" / TERMS).read_text())
        assert len(terms) == 4
        assert sum(terms.values()) == pytest.approx(observed[t] / observed[t - 1] - 1, rel=1e-6)


def test_the_signs_that_the_network_does_not_train_are_no_frozen_random_weights(tmp_path):
    events: list[Event] = []
    raypfl.run(two_layer(tmp_path, rounds=1), listeners=[events.append])
    assert not [event for event in events if isinstance(event, Warned)]


def test_an_interrupted_run_has_the_same_files_as_a_whole_one(tmp_path):
    changes = {"checkpoint__every": 2}
    whole = raypfl.run(two_layer(tmp_path, **changes))
    stopped = raypfl.run(two_layer(tmp_path, **changes), listeners=[Interrupt(3)])
    resumed = raypfl.resume(stopped.run_dir)
    names = [sorted(p.relative_to(files(r)) for p in files(r).rglob("*") if p.is_file()) for r in (whole, resumed)]
    assert names[0] == names[1]
    assert all((files(whole) / n).read_bytes() == (files(resumed) / n).read_bytes() for n in names[0])


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({"model": "{name: mlp}"}, "model: two_layer"),
        ({"objective__reduction": "mean"}, "reduction: sum"),
        ({"method__weighting": "samples"}, "weighting: uniform"),
        ({"training__batch_size": 3}, "batch_size: 6 or more"),
        ({"training__momentum": 0.9}, "without momentum"),
        ({"cohort__size": 2}, "all clients take part"),
    ],
)
def test_what_the_theory_is_not_about_is_refused_with_what_it_needs(tmp_path, changes, needed):
    with pytest.raises(RaypflError, match=f"needs other settings than these: [^;]*{needed}"):
        raypfl.run(two_layer(tmp_path, **changes))


def test_samples_sorted_by_their_targets_go_to_clients_in_equal_parts(result):
    data = opened(result)
    held = [np.concatenate([data.labels[data.indices(c, s)] for s in ("train", "test")]) for c in range(4)]
    assert [len(one) for one in held] == [8] * 4
    assert all(a.max() <= b.min() for a, b in pairwise(held))


def test_paired_units_begin_with_outputs_of_zero(tmp_path):
    run = raypfl.run(two_layer(tmp_path, model__paired="true", rounds=1))
    data = opened(run)
    y = np.concatenate([data.labels[data.indices(c, "train")] for c in range(4)])
    assert observed_errors(files(run), 1)[0] == pytest.approx(float(np.square(y).sum()), rel=1e-10)


@pytest.mark.parametrize("name", ["inputs.npy", "targets.npy"])
def test_arrays_that_are_missing_or_are_not_numbers_are_refused(tmp_path, name):
    made = two_layer(tmp_path)
    np.save(tmp_path / "data" / name, np.array(["a"]))
    with pytest.raises(RaypflError, match=rf"{name} holds <U1\[1\], not .*in floating point"):
        raypfl.run(made)
    (tmp_path / "data" / name).unlink()
    with pytest.raises(RaypflError, match=f"There is no {name}"):
        raypfl.run(made)
