"""Dropout and uniform noise draw by the keys of client and step, with both executors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raypfl.models.rowwise import RowWise
from tests.support.federation import (
    CLASSES,
    EXECUTORS,
    FP64,
    Federation,
    as_module,
    assert_close,
    both_executors,
    dropping_mlp,
)


def test_both_executors_draw_the_same_dropout_and_torchs_stream_has_no_part_in_it():
    trained = []
    for seed, executor in enumerate([*EXECUTORS, *EXECUTORS]):
        torch.manual_seed(seed)
        clients = Federation(dropping_mlp, executor=executor, training=replace(FP64, epochs=2)).clients()
        trained.append(clients.sgd(clients.loss, clients.initial).as_subclass(Tensor))
    assert_close(trained[0], trained[1])
    assert torch.equal(trained[0], trained[2]) and torch.equal(trained[1], trained[3])


@both_executors
def test_dropout_is_on_in_training_off_in_maps_and_differs_by_client_and_step(executor):
    def factory():
        return nn.Sequential(nn.Flatten(), nn.Dropout(0.4), nn.Linear(32, CLASSES))

    fed = Federation(factory, executor=executor, sizes=(4, 4), training=replace(FP64, steps=2))
    fed.split[1] = fed.split[0]
    clients = fed.clients()
    # With one batch of all samples and a rate too small to matter, only the draws can tell clients and steps apart.
    clients.sgd(clients.loss, clients.initial, steps=1, lr=1e-30)
    first = clients.losses
    clients.sgd(clients.loss, clients.initial, steps=2, lr=1e-30)
    net = as_module(factory, clients.initial).eval()
    calm = F.cross_entropy(net(fed.samples(0)[0]), fed.samples(0)[1]).detach()
    values = [*first.tolist(), *(2 * clients.losses - first).tolist(), calm.item()]

    assert len({round(v, 8) for v in values}) == 5
    assert_close(clients.map(clients.loss, clients.initial), calm.expand(2))


def test_dropout_keeps_its_share_scales_it_and_draws_every_layer_and_step_afresh():
    ones = torch.ones(100_000)
    masks = []
    for step in range(3):
        with RowWise(None, torch.tensor(12345 + step)):
            masks += [F.dropout(ones, 0.3, training=True) for _ in range(3)]

    for mask in masks:
        assert mask.unique().tolist() == pytest.approx([0.0, 1 / 0.7])
        assert float((mask > 0).float().mean()) == pytest.approx(0.7, abs=0.01)

    for i, mask in enumerate(masks):
        for other in masks[:i]:
            assert float(((mask > 0) & (other > 0)).float().mean()) == pytest.approx(0.49, abs=0.01)


OTHER_DROPOUTS = {
    nn.Dropout1d: (2, 16),
    nn.Dropout2d: (2, 4, 4),
    nn.Dropout3d: (2, 2, 2, 4),
    nn.AlphaDropout: (2, 16),
    nn.FeatureAlphaDropout: (2, 4, 4),
}
"""Kinds of dropout, and the shape in which they get a sample."""

other_dropouts = pytest.mark.parametrize("kind", OTHER_DROPOUTS, ids=[kind.__name__ for kind in OTHER_DROPOUTS])


@other_dropouts
@pytest.mark.filterwarnings("error::raypfl.clients.context.FallbackWarning")
def test_other_kinds_of_dropout_train_together_with_the_masks_of_each_client_alone(kind):
    def factory():
        reshaped = nn.Sequential(nn.Flatten(), nn.Linear(32, 32), nn.Unflatten(1, OTHER_DROPOUTS[kind]))
        return nn.Sequential(*reshaped, kind(0.5), nn.Flatten(), nn.Linear(32, CLASSES))

    def train(executor, ids=(0, 1, 2, 3), seed=0):
        torch.manual_seed(seed)
        clients = Federation(factory, executor=executor).clients(ids)
        return clients.sgd(clients.loss, clients.initial).as_subclass(Tensor)

    together = train("vectorised")
    assert_close(together, train("sequential", seed=1))
    assert_close(together[2:3], train("vectorised", [2]))


@other_dropouts
def test_other_kinds_of_dropout_drop_what_torchs_drop(kind):
    x = torch.rand(200, *OTHER_DROPOUTS[kind]) + 1.0
    drop = kind(0.3)
    torchs = torch.stack([drop(x) for _ in range(40)])
    with RowWise(None, torch.tensor(12345)):
        dropped = drop(x)

    # An entry is either kept or dropped; in forty draws of torch's, each was both.
    kept_value = torchs.amax(0)
    dropped_value = torchs.amin(0)
    is_kept = (dropped - kept_value).abs() < 1e-6
    assert (is_kept | ((dropped - dropped_value).abs() < 1e-6)).all()
    assert float(is_kept.float().mean()) == pytest.approx(0.7, abs=0.06)
    by_channel = is_kept.flatten(2)
    drops_channels = bool((by_channel == by_channel[:, :, :1]).all())
    assert drops_channels == (kind is not nn.AlphaDropout)


@pytest.mark.parametrize("name", ["dropout", "dropout2d", "alpha_dropout", "feature_alpha_dropout"])
@pytest.mark.parametrize("p", [0.4, 1.0])
def test_dropout_in_place_changes_its_input_as_torchs_does(p, name):
    drop = getattr(F, name)
    x = torch.rand(3, 2, 4, 4)
    with RowWise(None, torch.tensor(7)):
        expected = drop(x, p, training=True)
    assert not torch.equal(expected, x)
    with RowWise(None, torch.tensor(7)):
        assert drop(x, p, training=True, inplace=True) is x
    assert torch.equal(x, expected)


@both_executors
@pytest.mark.filterwarnings("ignore::raypfl.clients.context.FallbackWarning")
def test_a_network_that_calls_dropout_without_a_module_for_it_trains_to_the_same_bits_again(executor):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(32, CLASSES)

        def forward(self, x):
            return self.head(F.dropout(x.flatten(1), 0.5, self.training))

    def train(seed):
        torch.manual_seed(seed)
        clients = Federation(Net, executor=executor).clients()
        return clients.sgd(clients.loss, clients.initial)

    assert torch.equal(train(0), train(1))


def test_dropout_of_everything_leaves_zeros_as_torchs_does():
    x = torch.tensor([1.0, -2.0], requires_grad=True)
    with RowWise(None, torch.tensor(0)):
        dropped = torch.nn.functional.dropout(x, 1.0)
    assert torch.equal(dropped, torch.zeros(2))
    assert torch.equal(torch.autograd.grad(dropped.sum(), x)[0], torch.zeros(2))


def test_uniform_noise_has_the_type_that_is_asked_for():
    x = torch.zeros(3)
    with RowWise(None, torch.tensor(0)):
        assert torch.rand_like(x, dtype=torch.float64).dtype == torch.float64
