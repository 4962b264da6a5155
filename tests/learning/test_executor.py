"""Both executors do what the loop that everybody writes with torch does.

Everything is in float64, where they agree to 1e-10; the reference is ``torch.optim.SGD`` on an ordinary module.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from functools import partial
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raypfl.common.errors import ClientError
from raypfl.common.messages import per_client
from raypfl.evaluation.metric_sums import MetricSums
from raypfl.learning.batches import Samples
from raypfl.learning.settings import TrainingSettings
from raypfl.models import MODELS
from tests.support.federation import (
    CLASSES,
    EXECUTORS,
    FP64,
    SHAPE,
    Federation,
    NormalisedConv,
    as_module,
    as_vector,
    assert_close,
    bare_loop,
    both_executors,
    both_networks,
    gradient,
    starts_of,
    torch_sgd,
)

lenet = partial(MODELS.get("lenet"), input_shape=(2, 16, 16), num_classes=CLASSES)


SETTINGS = {
    "plain": FP64,
    "epochs": replace(FP64, epochs=3),
    "steps": replace(FP64, steps=7),
    "one full batch": replace(FP64, batch_size=100),
    "momentum": replace(FP64, momentum=0.9, epochs=2),
    "nesterov": replace(FP64, momentum=0.8, nesterov=True, epochs=2),
    "weight decay": replace(FP64, weight_decay=0.05),
    "clipping": replace(FP64, clip_norm=0.3, epochs=2),
    "all of it": replace(FP64, momentum=0.9, nesterov=True, weight_decay=0.01, clip_norm=0.5, steps=9),
}


@both_executors
@both_networks
@pytest.mark.parametrize("name", SETTINGS)
def test_training_is_the_bare_loops(name, factory, executor):
    fed = Federation(factory, executor=executor, training=SETTINGS[name])
    starts = starts_of(fed)
    clients = fed.clients()
    trained = clients.sgd(clients.loss, per_client(starts))
    models, losses = bare_loop(fed, starts)
    assert_close(trained, models)
    assert_close(clients.losses, losses)
    assert (models - starts).abs().max() > 1e-3


@both_executors
@pytest.mark.parametrize("sizes", [(40, 40, 40), (40, 9, 23)], ids=["equal", "unequal"])
def test_training_normalises_the_samples_that_it_visits_and_no_others(sizes, executor, monkeypatch):
    normalised = []
    normalise = Samples.normalise
    monkeypatch.setattr(Samples, "normalise", lambda self, x: normalised.append(x.numel()) or normalise(self, x))
    monkeypatch.setattr("raypfl.learning.batches.NORMALISE_ONCE_LIMIT", 0)
    fed = Federation(sizes=sizes, executor=executor, training=replace(FP64, steps=2))
    clients = fed.clients()
    visited = 3 * 2 * fed.training.batch_size * math.prod(SHAPE)
    clients.sgd(clients.loss, clients.initial)

    assert sum(normalised) == visited
    normalised.clear()
    theta = clients.initial.repeat(3, 1)
    for batch in clients.minibatches():
        theta = batch.step(clients.loss, theta)
    assert sum(normalised) == visited


@both_executors
@both_networks
@pytest.mark.parametrize("training", [FP64, SETTINGS["momentum"]], ids=["plain", "momentum"])
def test_one_start_for_all_and_a_copy_for_each_are_the_same_to_the_bit(training, factory, executor):
    fed = Federation(factory, executor=executor, training=training)
    clients = fed.clients()
    start = fed.model.init(5)
    common = clients.sgd(clients.loss, start).as_subclass(Tensor)
    each = clients.sgd(clients.loss, per_client(start.repeat(4, 1))).as_subclass(Tensor)

    assert torch.equal(common, each)
    rows = starts_of(fed)
    before = rows.clone()
    mixed = clients.sgd(clients.loss, per_client(rows)).as_subclass(Tensor)

    assert torch.equal(rows, before)

    for k in range(4):
        alone = fed.clients([k])
        assert_close(mixed[k], alone.sgd(alone.loss, rows[k])[0])


@both_executors
@pytest.mark.parametrize("train", [None, "1.weight, 3"])
def test_weight_decay_acts_on_the_named_segments_alone(train, executor):
    once = replace(FP64, weight_decay=0.5, clip_norm=0.3, steps=1, batch_size=100)
    fed = Federation(executor=executor, training=once)
    starts = per_client(starts_of(fed))
    clients = fed.clients()
    slopes = clients.grad(clients.loss, starts)
    moving = fed.model.mask(train or "*").double()
    slopes = slopes * moving
    slopes = slopes * (0.3 / (slopes.norm(dim=1, keepdim=True) + 1e-6)).clamp_max(1.0)
    decayed = starts * fed.model.mask("3.weight, 1.bias") * moving
    trained = clients.sgd(clients.loss, starts, train=train, decay="3.weight, 1.bias")

    assert_close(trained, starts - 0.1 * (slopes + 0.5 * decayed))


@both_executors
@pytest.mark.parametrize("training", [FP64, SETTINGS["all of it"]], ids=["plain", "all of it"])
def test_only_the_named_segment_moves_and_the_rest_stays_to_the_bit(training, executor):
    fed = Federation(NormalisedConv, executor=executor, training=training)
    starts = starts_of(fed)
    clients = fed.clients()
    trained = clients.sgd(clients.loss, per_client(starts), train="head").as_subclass(Tensor)
    bare = bare_loop(fed, starts, trained="head")[0]
    head = fed.model.mask("head")

    assert_close(fed.model.parameters(trained), fed.model.parameters(bare))
    assert torch.equal(trained[:, ~head], starts[:, ~head])
    assert (trained != starts)[:, head].any(1).all()

    by_mask = fed.clients().sgd(clients.loss, per_client(starts), train=head)
    assert torch.equal(by_mask.as_subclass(Tensor), trained)


class Gate(torch.autograd.Function):
    """The identity, which records the gradients that go back through it."""

    generate_vmap_rule = True
    passed: ClassVar[list[torch.Size]] = []

    @staticmethod
    def forward(z: Tensor) -> Tensor:
        return z.clone()

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        Gate.passed.append(gradient.shape)
        return gradient.clone()


class Gated(nn.Module):
    """A network with a gate between body and head."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(SHAPE), 5), nn.Tanh())
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(Gate.apply(self.body(x)))


@both_executors
@pytest.mark.parametrize("train, through", [("head", False), ("body", True), ("head, body.1.bias", True)])
def test_no_gradient_goes_back_past_what_stands_still(train, through, executor):
    fed = Federation(Gated, executor=executor, training=replace(FP64, momentum=0.9))
    clients = fed.clients()
    Gate.passed.clear()
    clients.sgd(clients.loss, clients.initial, train=train)
    assert bool(Gate.passed) == through


@both_executors
def test_where_nothing_moves_the_loss_is_all_that_comes_out(executor):
    fed = Federation(executor=executor, training=FP64)
    clients = fed.clients()
    nothing = torch.zeros(fed.model.size, dtype=torch.bool)
    trained = clients.sgd(clients.loss, clients.initial, train=nothing)
    assert torch.equal(trained.as_subclass(Tensor), clients.initial.expand(len(trained), -1))
    assert (clients.losses > 0).all()


@both_executors
def test_epochs_steps_rate_and_batch_size_of_a_call_win_over_the_experiments(executor):
    fed = Federation(executor=executor, training=FP64)
    reference = Federation(training=replace(FP64, steps=3, batch_size=2, lr=0.05))
    clients = fed.clients()
    trained = clients.sgd(clients.loss, clients.initial, steps=3, batch_size=2, lr=0.05)
    assert_close(trained, bare_loop(reference, reference.model.init(3).expand(4, -1))[0])


@both_executors
@pytest.mark.parametrize("nothing", [{"epochs": 0}, {"steps": 0}])
def test_no_epoch_or_step_leaves_the_models_alone(nothing, executor):
    clients = Federation(executor=executor).clients()
    assert torch.equal(clients.sgd(clients.loss, clients.initial, **nothing), clients.initial.expand(4, -1))


@both_executors
def test_a_clients_training_is_the_same_alone_and_in_every_group(executor):
    fed = Federation(executor=executor, training=SETTINGS["all of it"])
    everybody = fed.clients()
    together = everybody.sgd(everybody.loss, everybody.initial)
    for ids in ([2], [3, 1]):
        group = fed.clients(ids)
        assert_close(group.sgd(group.loss, group.initial), together[ids].as_subclass(Tensor), 1e-12)


@both_executors
def test_extras_are_passed_row_by_row_or_whole(executor):
    fed = Federation(executor=executor)
    clients = fed.clients()
    starts = starts_of(fed)
    anchors = torch.randn(4, fed.model.size).double()
    common = torch.randn(fed.model.size).double()

    def loss(p, batch, anchor, pull, common, by):
        return clients.loss(p, batch) + pull * (p - anchor).square().sum() + by / 2 * (p - common).square().sum()

    pulls = torch.tensor([0.0, 0.1, 0.2, 0.3]).double()
    extras = {"anchor": per_client(anchors), "pull": per_client(pulls), "common": common, "by": 0.4}
    trained = clients.sgd(loss, per_client(starts), **extras)
    for k in range(4):
        net = as_module(fed.factory, starts[k])

        def penalty(p, k=k):
            return pulls[k] * (p - anchors[k]).square().sum() + 0.2 * (p - common).square().sum()

        torch_sgd(net, fed.visits(k), lr=0.1, penalty=penalty)
        assert_close(trained[k], as_vector(net))


@both_executors
def test_a_model_vector_among_the_extras_is_cut_to_its_parameters(executor):
    fed = Federation(NormalisedConv, executor=executor)
    clients = fed.clients()
    anchors = starts_of(fed) + 0.1
    seen = []

    def loss(p, batch, anchor, common):
        seen.append((p.shape, anchor.shape, common.shape))
        return clients.loss(p, batch) + (p - anchor).square().sum() + (p - common).square().sum()

    trained = clients.sgd(loss, clients.initial, anchor=per_client(anchors), common=clients.initial)
    size = fed.model.num_parameters
    assert set(seen) == {((size,), (size,), (size,))}

    for k in range(4):
        net = as_module(fed.factory, clients.initial)

        def penalty(p, k=k):
            return (p - anchors[k][:size]).square().sum() + (p - clients.initial[:size]).square().sum()

        torch_sgd(net, fed.visits(k), lr=0.1, penalty=penalty)
        assert_close(trained[k], as_vector(net))


@both_executors
def test_a_loss_may_evaluate_the_network_elsewhere_than_at_its_parameters(executor):
    fed = Federation(executor=executor)
    clients = fed.clients()

    def loss(p, batch):
        return clients.loss(0.5 * p, batch)

    trained = clients.sgd(loss, clients.initial, steps=1, batch_size=100)
    for k in range(4):
        assert_close(trained[k], clients.initial - 0.1 * 0.5 * gradient(fed, 0.5 * clients.initial, k))


@both_executors
def test_a_network_with_statistics_may_be_evaluated_elsewhere_than_at_its_parameters(executor):
    clients = Federation(NormalisedConv, executor=executor).clients()

    def loss(p, batch):
        return clients.loss(p * 1.0, batch)

    assert_close(clients.sgd(loss, clients.initial), clients.sgd(clients.loss, clients.initial).as_subclass(Tensor))


@both_executors
def test_bf16_is_near_fp32_and_keeps_weights_in_fp32(executor):
    rows = {}
    for precision in ("fp32", "bf16"):
        training = TrainingSettings(precision=precision, batch_size=4, lr=0.1, epochs=3)
        clients = Federation(NormalisedConv, executor=executor, training=training).clients()
        rows[precision] = clients.sgd(clients.loss, clients.initial).as_subclass(Tensor) - clients.initial
        assert rows[precision].dtype == clients.losses.dtype == torch.float32
    error = (rows["bf16"] - rows["fp32"]).norm(dim=1) / rows["fp32"].norm(dim=1)
    assert (error > 0).all() and (error < 0.1).all()


@both_executors
def test_class_means_are_taken_in_fp32_over_features_in_bf16(executor):
    """Half of each feature is 256, half 257: in bf16 their mean would be 256."""

    def features(theta: Tensor, x: Tensor) -> Tensor:
        return theta[:1].abs() * 0 + torch.arange(len(x), device=x.device)[:, None] % 2 + 256

    fed = Federation(executor=executor, training=TrainingSettings(precision="bf16"), sizes=(40, 40))
    fed.labels[:] = 1
    means, _ = fed.clients().class_means(features, fed.model.init(0))
    assert means.dtype == torch.float32
    assert_close(means[:, 1], torch.full((2, 1), 256.5))


@both_executors
def test_channels_last_is_a_layout_and_nothing_else(executor):
    layouts = []

    class Watching(NormalisedConv):
        def forward(self, x):
            layouts.append(executor == "vectorised" or x.is_contiguous(memory_format=torch.channels_last))
            return super().forward(x)

    fed = Federation(Watching, executor=executor, training=replace(FP64, channels_last=True))
    clients = fed.clients()
    trained = clients.sgd(clients.loss, clients.initial)
    assert all(layouts)
    assert_close(trained, bare_loop(fed, clients.initial.expand(4, -1))[0])


@both_executors
def test_one_sample_left_over_is_trained_alike_by_both_executors_under_batch_norm(executor):
    # Two dimensions after the channels, so torch's own batch norm takes a batch of one as well.
    fed = Federation(NormalisedConv, sizes=(5, 9), executor=executor)
    clients = fed.clients()
    trained = clients.sgd(clients.loss, clients.initial)
    assert_close(trained, bare_loop(fed, clients.initial.expand(2, -1))[0])


@both_executors
def test_a_batch_of_one_sample_under_batch_norm_is_refused_in_a_sentence(executor):
    def factory():
        return nn.Sequential(nn.Flatten(), nn.Linear(32, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES))

    clients = Federation(factory, sizes=(8, 9), executor=executor).clients()
    with pytest.raises(ClientError, match=r"Client 1 has a batch of one sample.*training\.batch_size"):
        clients.sgd(clients.loss, clients.initial)


def test_lenet_trains_the_same_by_both_executors():
    rows = []
    for executor in EXECUTORS:
        fed = Federation(lenet, executor=executor, sizes=(6, 3))
        fed.inputs = np.random.default_rng(0).integers(0, 17, (18, 2, 16, 16), dtype=np.uint8)
        clients = fed.clients()
        rows.append(clients.sgd(clients.loss, clients.initial).as_subclass(Tensor))
        assert_close(rows[-1], bare_loop(fed, clients.initial.expand(2, -1))[0])
    assert_close(*rows)


@both_executors
def test_evaluation_counts_each_models_right_answers_on_its_own_samples(executor):
    fed = Federation(NormalisedConv, executor=executor)
    fed.context.evaluation_batch = 3
    clients = fed.clients()
    models = starts_of(fed) + 0.1
    scores = clients.evaluate(per_client(models), split="train")
    samples, correct, loss = (scores[name] for name in ("samples", "accuracy", "loss"))
    everywhere = np.concatenate(fed.split)
    union = MetricSums(fed.context.measures).accumulate(fed.context.model_outputs(models, everywhere), 4)
    union_correct = union[:, 1]
    union_loss = union[:, 2]
    logits = clients.logits(models, fed.samples(1)[0])

    assert samples.tolist() == list(fed.sizes)

    for k in range(4):
        net = as_module(fed.factory, models[k]).eval()
        with torch.no_grad():
            x, y = fed.samples(k)
            assert samples[k] * correct[k] == (net(x).argmax(1) == y).sum()
            assert float(loss[k]) == pytest.approx(float(F.cross_entropy(net(x), y)), rel=1e-5)
            x, y = (torch.cat(part) for part in zip(*(fed.samples(c) for c in range(4)), strict=True))
            assert union_correct[k] == (net(x).argmax(1) == y).sum()
            assert float(union_loss[k]) == pytest.approx(float(F.cross_entropy(net(x), y, reduction="sum")), rel=1e-5)
            assert_close(logits[k], net(fed.samples(1)[0]))


@both_executors
def test_clients_without_test_samples_score_nothing(executor):
    clients = Federation(executor=executor).clients()
    scores = clients.evaluate(clients.initial, split="test")
    assert scores["samples"].tolist() == [0] * 4 and scores["accuracy"].isnan().all()


@both_executors
def test_a_method_may_change_what_a_state_defaults_to_without_changing_the_initial_model(executor):
    fed = Federation(executor=executor, sizes=(5,))
    clients = fed.clients()
    before = clients.initial.clone()
    clients.state.get("personal", default=clients.initial).add_(1)
    assert torch.equal(fed.clients().initial, before)


def test_the_learning_rate_follows_its_schedule():
    def rates(rounds=4, **options):
        return [TrainingSettings(lr=0.8, **options).learning_rate(r, rounds) for r in range(rounds)]

    net = nn.Linear(1, 1)
    torchs = {
        "exponential": partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5),
        "step": partial(torch.optim.lr_scheduler.MultiStepLR, milestones=[1, 3], gamma=0.1),
        "cosine": partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=4),
    }
    options = {"exponential": {"decay": 0.5}, "step": {"milestones": (1, 3), "gamma": 0.1}, "cosine": {}}

    for name, scheduler_of in torchs.items():
        optimizer = torch.optim.SGD(net.parameters(), lr=0.8)
        scheduler = scheduler_of(optimizer)
        expected = []
        for _ in range(4):
            expected.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        assert rates(schedule=name, **options[name]) == pytest.approx(expected)

    assert rates() == [0.8] * 4
    assert rates(warmup_rounds=2) == pytest.approx([0.4, 0.8, 0.8, 0.8])


@both_executors
@pytest.mark.parametrize("ends", ["well", "badly"])
def test_training_leaves_the_shared_network_as_it_found_it(ends, executor):
    fed = Federation(NormalisedConv, executor=executor)
    clients = fed.clients()
    before = {name: tensor.clone() for name, tensor in fed.model.module.state_dict().items()}

    def loss(p, batch):
        if ends == "badly":
            raise ArithmeticError
        return clients.loss(p, batch)

    with contextlib.suppress(ArithmeticError):
        clients.sgd(loss, per_client(starts_of(fed)))
    after = fed.model.module.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())

    trained = clients.sgd(clients.loss, clients.initial)
    assert_close(trained, bare_loop(fed, clients.initial.expand(4, -1))[0])
