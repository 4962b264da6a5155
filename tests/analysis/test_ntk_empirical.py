"""The neural tangent kernel of any network (FL-NTK, sections 8.5 and 9), and the analysis of rounds by it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import raypfl
from raypfl.analysis.base import load_observations
from raypfl.analysis.ntk import NTK, nonlinear
from raypfl.analysis.theory import empirical
from raypfl.analysis.theory.empirical import Side, extremes, jacobian, kernel, product, push_forward, sketch
from raypfl.common.errors import ConfigError
from raypfl.engine.events import RoundFinished
from raypfl.models.flat import FlatModel
from tests.support.ntk import problem
from tests.support.runs import experiment


def tanh_net() -> FlatModel:
    return FlatModel(lambda: nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 3)), dtype=torch.float64)


def side(model: FlatModel, seed: int, x: torch.Tensor) -> Side:
    return Side(model, model.init(seed), x)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(7, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_the_kernel_of_two_layers_is_the_closed_form():
    p = problem(m=64)
    network_side = Side(lambda u, x: p.network.outputs(u.view(64, 10), x)[:, None], p.u.flatten(), p.x)
    assert torch.allclose(kernel(network_side, network_side, 1), p.h0, atol=1e-10)


def test_blocks_of_any_size_give_the_same_kernel_in_the_memory_of_one_block(x, monkeypatch):
    model = tanh_net()
    rows = side(model, 0, x)
    columns = side(model, 1, x[:4])
    largest = 0
    whole = torch.einsum("icp,jdp->icjd", jacobian(rows), jacobian(columns)).reshape(21, 12)

    def counted(block_side: Side) -> torch.Tensor:
        nonlocal largest
        block = jacobian(block_side)
        largest = max(largest, block.numel())
        return block

    monkeypatch.setattr(empirical, "jacobian", counted)
    room = 4 * 3 * model.num_parameters
    assert torch.allclose(kernel(rows, columns, 3, room), whole, atol=1e-12)
    assert largest == room / 2, "two samples on each side at a time, of the 7 and the 4 that there are"


def test_sketches_have_the_kernel_as_their_mean_and_err_with_the_square_root_of_their_size():
    model = FlatModel(lambda: nn.Sequential(nn.Linear(5, 200), nn.Tanh(), nn.Linear(200, 50)), dtype=torch.float64)
    x = torch.randn(5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows, columns = (Side(lambda p, x: model(p, x).sum(1, keepdim=True), model.init(seed), x) for seed in (0, 1))
    exact = kernel(rows, columns, 1)
    sizes = (50, 200, 800)
    errors = []

    for size in sizes:
        estimates = torch.stack([sketch(rows, 1, size, s) @ sketch(columns, 1, size, s).T for s in range(50)])
        assert ((estimates.mean(0) - exact).abs() <= 4 * estimates.std(0) / 50**0.5).all()
        errors.append(float((estimates - exact).square().sum((1, 2)).mean().sqrt() / exact.norm()))

    assert np.polyfit(np.log(sizes), np.log(errors), 1)[0] == pytest.approx(-0.5, abs=0.1)


def test_a_sketch_as_long_as_the_parameters_is_exact_in_blocks_of_any_size(x):
    model = tanh_net()
    rows = side(model, 0, x)
    columns = side(model, 1, x[:4])
    for size in (model.num_parameters, 2 * model.num_parameters):
        estimate = sketch(rows, 3, size) @ sketch(columns, 3, size, max_numbers=1).T
        assert torch.allclose(estimate, kernel(rows, columns, 3), atol=1e-12)


@pytest.mark.filterwarnings("error::FutureWarning")
def test_products_without_the_kernel_equal_those_with_it(x):
    model = tanh_net()
    rows = side(model, 0, x)
    clients = [side(model, 1, x[:3]), side(model, 2, x[3:])]
    parts = [torch.randn(len(c.x), 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64) for c in clients]
    dense = sum(kernel(rows, c, 3) @ v.flatten() for c, v in zip(clients, parts, strict=True))
    assert torch.allclose(product(rows, list(zip(clients, parts, strict=True))).flatten(), dense, atol=1e-10)
    values = torch.linalg.eigvalsh(kernel(rows, rows, 3))
    assert extremes(rows, 3) == pytest.approx((float(values[0]), float(values[-1])), rel=1e-4)


def test_a_round_is_the_clients_kernels_times_their_errors_to_first_order(x):
    """The identity of section 9.2, for two clients that take two steps on the sum of halved squared errors."""
    model = tanh_net()
    rate = 0.01
    start = model.init(0)
    y = torch.randn(7, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64)

    moved = torch.zeros_like(start)
    columns = []
    for part in (slice(0, 3), slice(3, 7)):
        w = start.clone()
        for _ in range(2):
            error = (model(w, x[part]) - y[part]).detach()
            columns.append((Side(model, w, x[part]), -rate / 2 * error))
            w = w + 2 * empirical.pull_back(*columns[-1])
        moved += (w - start) / 2

    rows = Side(model, start, x)
    assert torch.allclose(push_forward(rows, moved), product(rows, columns), atol=1e-12)


def test_the_nonlinear_part_halves_with_the_step(x):
    model = tanh_net()
    direction = torch.randn(model.size, generator=torch.Generator().manual_seed(5)).double()
    start = model.init(0)
    parts = [nonlinear(model, start, start + scale * direction, x) for scale in (0.02, 0.01, 0.005)]
    assert all(1.8 <= a / b <= 2.2 for a, b in ((parts[0], parts[1]), (parts[1], parts[2])))


def test_relu_in_place_has_the_same_jacobian(x):
    jacobians = []
    for in_place in (False, True):
        layers = [nn.Linear(5, 12), nn.ReLU(inplace=in_place), nn.Linear(12, 3)]
        model = FlatModel(lambda layers=layers: nn.Sequential(*layers), dtype=torch.float64)
        theta = torch.randn(model.size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        jacobians.append(jacobian(Side(model, theta, x)))
    assert torch.equal(*jacobians)


def analysed(folder: Path, **changes) -> raypfl.Experiment:
    settings = {"method": "fedavg", "rounds": 2, "training__steps": 3, "partition__clients": 4, "cohort__size": 3}
    return experiment(folder, **settings | changes).replace(analyses=[{"name": "ntk", "every": 2, "probe": 12}])


@pytest.mark.parametrize("model", ["{name: mlp, hidden: [16]}", "tests.support.observing_analyses:dropping"])
def test_clients_compute_their_columns_with_the_statistics_of_each_model(tmp_path, model):
    """The second network has batch norm and dropout: in evaluation mode, its kernel has no trace of the batch."""
    run = raypfl.run(analysed(tmp_path, model=model, training__smallest_batch=2, training__precision="fp64"))
    folder = run.run_dir / "analyses/ntk"
    clients = run.rounds["cohort"][1].as_py()
    observed = {c: list(load_observations(folder, 2, c)) for c in clients}

    assert all([step.step for step in steps] == [0, 2] for steps in observed.values())

    first, last = (np.load(folder / f"round-000002/kernel{end}.npy") for end in ("", "-last-step"))
    assert first.shape == (9, 9) and np.allclose(first, first.T, atol=1e-10) and not np.allclose(last, first, rtol=1e-3)

    # The second client's columns hold the rows of all four clients, of which three are in the cohort.
    rows = np.concatenate([3 * client + np.arange(3) for client in clients])
    assert np.array_equal(first[:, 3:6], observed[clients[1]][0].arrays["kernel"][rows])


def test_the_run_says_what_departs_from_a_linear_model(tmp_path):
    diagnoses = {}
    for lr in (0.001, 1.0):
        run = raypfl.run(analysed(tmp_path, training__lr=lr, training__steps=5))
        diagnoses[lr] = json.loads((run.run_dir / "analyses/ntk/diagnosis.json").read_text())
        values = {row["name"] for row in run.logged.to_pylist() if row["round"] == 2}
        assert {"ntk_least", "ntk_largest", "ntk_drift", "ntk_between", "ntk_nonlinear"} <= values

    assert diagnoses[0.001]["nonlinear"] < 0.1 < diagnoses[1.0]["nonlinear"]
    assert (
        "almost that of a linear model" in diagnoses[0.001]["sentence"] and "departs most" in diagnoses[1.0]["sentence"]
    )


@pytest.mark.thorough
def test_a_sketch_as_long_as_the_parameters_gives_the_exact_kernel_in_a_run(tmp_path):
    kernels = {}
    for sketch_of in (0, 100_000):
        settings = analysed(tmp_path, training__precision="fp64")
        run = raypfl.run(settings.replace(analyses=[NTK(every=2, probe=12, outputs="all", sketch=sketch_of)]))
        [folder] = (run.run_dir / "analyses/ntk").glob("round-*")
        kernels[sketch_of] = [np.load(folder / f"kernel{end}.npy") for end in ("", "-last-step")]

    for exact, sketched in zip(kernels[0], kernels[100_000], strict=True):
        assert exact.shape == (90, 90) and np.allclose(exact, sketched, rtol=1e-9)

    folder = run.run_dir / "analyses/ntk"
    [seen, *_] = load_observations(folder, 2, run.rounds["cohort"][1].as_py()[0])
    assert seen.arrays["gradients"].shape == (30, 100_000)
    assert "least" not in json.loads((folder / "diagnosis.json").read_text())


@pytest.mark.parametrize("method", ["ditto", "local"])
def test_methods_without_a_global_model_or_with_two_trainings_are_analysed(tmp_path, method):
    run = raypfl.run(analysed(tmp_path, method=method))
    assert (run.run_dir / "analyses/ntk/round-000002/kernel.npy").exists()


def test_all_outputs_are_rows_with_outputs_all(tmp_path):
    run = raypfl.run(analysed(tmp_path).replace(analyses=[NTK(probe=4, outputs="all")]))
    assert np.load(run.run_dir / "analyses/ntk/round-000002/kernel.npy").shape == (30, 30)


class Recurrent(nn.Module):
    """Reads the rows of an image one after the other, with an operation that torch.func.vmap does not know."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int):
        super().__init__()
        self.gru = nn.GRU(input_shape[-1], 4, batch_first=True)
        self.head = nn.Linear(4, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, _ = self.gru(x[:, 0])
        return self.head(states[:, -1])


def test_a_network_without_gradients_of_single_samples_is_refused_before_the_first_round(tmp_path):
    events = []
    recurrent = analysed(tmp_path).replace(model={"name": f"{__name__}:Recurrent"})
    with pytest.raises(ConfigError, match=r"^analyses\.ntk takes a gradient for each sample.*aten::gru.*leave"):
        raypfl.run(recurrent, listeners=[events.append])
    assert not any(isinstance(event, RoundFinished) for event in events)
