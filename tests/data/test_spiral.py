"""The spiral of FedNH's paper, and the picture of what a head does to its latent space."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import raypfl
from raypfl.common.errors import ConfigError
from raypfl.data.datasets import DataConfig
from raypfl.data.datasets.readers.spiral import EXTENT, Spiral, as_bytes, spirals
from raypfl.models import MODELS
from raypfl.results.drawing import latent_picture
from tests.support.runs import experiment


def points_of(raw) -> np.ndarray:
    """The points of the spiral, ``[N, 2]``."""
    return (raw.inputs[:, :, 0, 0] / 255 * 2 - 1) * EXTENT


@pytest.mark.parametrize(
    ("variant", "counts"),
    [("balanced", [3000] * 6), ("imbalanced", [3000, 1500, 750, 375, 187, 93]), ("printed", [3000] * 6)],
)
def test_arms_have_as_many_points_as_published_and_a_balanced_test_split(variant, counts):
    raw = Spiral(DataConfig(), variant=variant).read()
    assert np.bincount(raw.labels[~raw.test_mask]).tolist() == counts
    assert np.bincount(raw.labels[raw.test_mask]).tolist() == [500] * 6
    radii = np.linalg.norm(points_of(raw), axis=1)
    assert radii.min() == pytest.approx(1, abs=0.1) and radii.max() == pytest.approx(10, abs=0.1)
    again = Spiral(DataConfig(), variant=variant).read()
    assert (again.inputs == raw.inputs).all()


def test_bytes_keep_a_point_within_half_a_step_of_the_grid():
    points, _ = spirals([200] * 6, 0.15, False, seed=1)
    back = (as_bytes(points) / 255 * 2 - 1) * EXTENT
    assert np.abs(back - points).max() <= EXTENT / 255 + 1e-9


def test_arms_turn_by_sixty_degrees_and_meet_by_the_printed_formula():
    points, _ = spirals([100] * 6, 0.0, False, seed=0)
    angles = np.arctan2(points[:, 0], points[:, 1]).reshape(6, 100)
    turned = np.rad2deg(np.angle(np.exp(1j * (angles[:, -1] - angles[:, 0]))))

    np.testing.assert_allclose(turned, 60, atol=1e-6)

    printed, _ = spirals([100] * 6, 0.0, True, seed=0)
    ends = printed.reshape(6, 100, 2)[:, -1]
    np.testing.assert_allclose(ends[[0, 1, 2]], ends[[3, 4, 5]], atol=1e-9)
    assert not np.allclose(points.reshape(6, 100, 2)[0, -1], points.reshape(6, 100, 2)[3, -1])


def test_an_unknown_variant_is_refused():
    with pytest.raises(
        ConfigError, match=r"data.variant is 'odd', but must be 'balanced' or 'imbalanced' or 'printed'"
    ):
        DataConfig(name="spiral", options={"variant": "odd"})


def test_the_toys_network_has_five_layers_and_features_in_all_directions():
    torch.manual_seed(2)
    net = MODELS.get("mlp")((2, 1, 1), 6, hidden=[64, 64, 64], latent=2, head_bias=False)
    shapes = [tuple(p.shape) for p in net.parameters() if p.dim() == 2]
    assert shapes == [(64, 2), (64, 64), (64, 64), (2, 64), (6, 2)] and net[-1].bias is None
    z = net[:-1](torch.randn(500, 2, 1, 1) * 10)
    assert (z < 0).any()  # the latent layer has no ReLU


def test_features_of_conv2cifar_may_be_taken_before_the_relu():
    inputs = torch.randn(4, 3, 32, 32)
    for relu in (True, False):
        torch.manual_seed(0)
        net = MODELS.get("conv2cifar")((3, 32, 32), 10, relu_latent=relu)
        seen = []
        net.head.register_forward_pre_hook(lambda _, z, seen=seen: seen.append(z[0]))
        net(inputs)
        assert bool((seen[0] < 0).any()) != relu


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> raypfl.Result:
    """A short run of FedNH on the spiral of which every round's checkpoint is kept."""
    folder = tmp_path_factory.mktemp("spiral")
    model = "{name: mlp, hidden: [32, 32], latent: 2, head_bias: false}"
    changes = {"data": "spiral", "model": model, "rounds": 5, "evaluation__every": 0, "tracking__latent": "true"}
    changes |= {"training": "{epochs: 1, batch_size: 64, lr: 0.05, momentum: 0.9}", "checkpoint": "{every: 1, keep: 9}"}
    return raypfl.run(experiment(folder, method="{name: fednh, scale: 20}", **changes))


def test_a_run_that_keeps_its_checkpoints_has_the_servers_state_of_every_round(run):
    states = run.server_states()
    assert [round for round, _ in states] == [1, 2, 3, 4, 5]
    assert torch.equal(states[-1][1]["theta"], run.server_state()["theta"])
    assert not torch.equal(states[0][1]["theta"], states[-1][1]["theta"])


def test_the_latent_space_is_shown_from_the_start_with_evenly_spread_prototypes(run):
    latent = latent_picture.latent_of(run)
    assert latent.rounds == [0, 1, 2, 3, 4, 5]
    w = latent.prototypes[0]
    np.testing.assert_allclose(np.sort((w @ w.T)[0]), [-1, -0.5, -0.5, 0.5, 0.5, 1], atol=1e-6)
    assert {z.shape for z in latent.features} == {(600, 2)} and {w.shape for w in latent.prototypes} == {(6, 2)}
    at_home = [(z @ w.T).argmax(1) == latent.labels for z, w in zip(latent.features, latent.prototypes, strict=True)]
    assert at_home[-1].mean() > at_home[0].mean() + 0.2


def test_the_picture_shows_runs_that_request_it_and_have_a_global_model(run, tmp_path):
    assert [group.label for group in latent_picture.groups_to_draw([run])] == ["fednh"]

    path = latent_picture.draw([run], tmp_path / "latent.png")
    assert path.read_bytes()[:4] == b"\x89PNG" and path.stat().st_size > 20_000

    ended = {"status": "finished", "counts": True, "run_dir": run.run_dir}
    unasked = SimpleNamespace(experiment=run.experiment.override(["tracking.latent=false"]), **ended)
    assert latent_picture.groups_to_draw([unasked]) == []

    alone = SimpleNamespace(server_state=dict, experiment=run.experiment.replace(method="local"), **ended)
    assert latent_picture.groups_to_draw([alone]) == []
    with pytest.raises(ConfigError, match=r"tracking\.latent=true"):
        latent_picture.draw([alone, unasked], tmp_path / "none.png")


@pytest.mark.thorough
def test_many_dimensions_are_projected_and_fedrods_prototypes_are_its_generic_head(tmp_path):
    changes = {"rounds": 2, "evaluation__every": 0, "tracking__latent": "true", "checkpoint": "{every: 1, keep: 9}"}
    results = [raypfl.run(experiment(tmp_path, method=method, **changes)) for method in ("fedrod", "fednh")]
    latent = latent_picture.latent_of(results[0])
    generic = results[0].global_model()[-2 * 170 : -170][:160].reshape(10, 16)
    np.testing.assert_allclose(latent.prototypes[-1], generic.double())
    assert latent_picture.draw(results, tmp_path / "latent.png").stat().st_size > 20_000


@pytest.mark.parametrize(
    ("kept_rounds", "panels"), [([6], ["start", "round 6"]), ([2, 4, 6], ["start", "round 4", "round 6"])]
)
def test_the_picture_has_a_panel_for_each_of_at_most_three_states(run, tmp_path, monkeypatch, kept_rounds, panels):
    figures = []

    def savefig(figure, path, **_) -> None:
        path.touch()
        figures.append(figure)

    monkeypatch.setattr(latent_picture.Figure, "savefig", savefig)
    latent = latent_picture.latent_of(run)
    count = 1 + len(kept_rounds)
    few = replace(
        latent,
        rounds=[0, *kept_rounds],
        features=latent.features[:count],
        prototypes=latent.prototypes[:count],
    )
    monkeypatch.setattr(latent_picture, "latent_of", lambda _: few)
    latent_picture.draw([run], tmp_path / "latent.png")
    (figure,) = figures
    panel_axes = [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]
    assert [axes.get_title(loc="left") for axes in panel_axes] == [*panels, "cosines of prototypes, round 6"]
    assert all(axes.get_visible() for axes in panel_axes)
