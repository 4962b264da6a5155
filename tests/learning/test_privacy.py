"""Differential privacy: clipping, noise, accounting, and refusals."""

from __future__ import annotations

import ast
import json
import math
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import raypfl
from raypfl import Experiment, Mean, Result, resume, run
from raypfl.clients.clients import WITH_NOISE, WITHOUT_CONTENTS
from raypfl.clients.steps.local_training import prepare_training
from raypfl.common import device_rng
from raypfl.common.errors import ConfigError, MethodError, PrivacyError
from raypfl.common.messages import per_client, unmarked
from raypfl.learning.executor import GroupTraining
from raypfl.learning.loss import LocalLoss
from raypfl.learning.objectives.batch import Batch
from raypfl.learning.privacy import NoisySum, PrivacySettings
from raypfl.learning.privacy.accounting import ALL, ORDERS, accounted, epsilon, epsilons_of
from raypfl.learning.sample_order import epoch_order, sampled_order
from raypfl.methods import MTL, Ditto, FedAvg, FedNH, FedProto, PerAda, PFedMe
from raypfl.results.display.epsilons import epsilons, privacy_sentence
from raypfl.results.run_groups import group_runs
from raypfl.runs.driver import check
from tests.support.federation import (
    CLASSES,
    EXECUTORS,
    FP64,
    SHAPE,
    Federation,
    assert_close,
    both_executors,
    gradient,
    starts_of,
)

CLIPS = PrivacySettings(noise=0.0, clip=0.3)
NOISY = PrivacySettings(noise=1.0, clip=1.0)


def sampled(fed: Federation, k: int) -> list[tuple[Tensor, Tensor]]:
    """Return the k-th client's batches in its first private training."""
    group = fed.clients()._group
    t = fed.training
    keys = group.keys("batches  1")[k : k + 1]
    visits = sampled_order(keys, np.array(fed.sizes)[k : k + 1], t.batch_size, t.epochs, t.steps)
    return [fed.samples(k, index[:count]) for index, count in zip(visits.index[0], visits.counts[0], strict=True)]


def by_hand(fed: Federation, start: Tensor, k: int, anchor: Tensor | None = None, lam: float = 0.0) -> Tensor:
    """DP-SGD without noise: a loop over samples, the pull after clipping."""
    theta = start
    for x, y in sampled(fed, k):
        total = torch.zeros_like(theta)
        for i in range(len(y)):
            slope = gradient(fed, theta, k, (x[i : i + 1], y[i : i + 1]))
            total += slope * min(1.0, fed.privacy.clip / float(slope.norm()))
        pull = 0.0 if anchor is None else lam * (theta - anchor)
        theta = theta - fed.training.lr * (total / fed.training.batch_size + pull)

    return theta


@both_executors
def test_clipping_is_a_plain_loop_over_the_samples_of_poisson_batches(executor):
    # A client with fewer samples than a batch takes all of them, and divides by the size of a batch.
    fed = Federation(sizes=(7, 3, 11, 7), executor=executor, training=replace(FP64, epochs=2), privacy=CLIPS)
    clients = fed.clients()
    starts = starts_of(fed)
    trained = clients.sgd(clients.loss, per_client(starts))
    walked = per_client(starts)
    new_clients = fed.clients()
    for batch in new_clients.minibatches():
        walked = batch.step(new_clients.loss, walked)
    for k, start in enumerate(starts):
        assert_close(trained[k], by_hand(fed, start, k), 1e-12)
        assert_close(walked[k], trained[k], 1e-12)


@both_executors
def test_a_pull_is_added_after_clipping_and_is_not_clipped(executor):
    fed = Federation(executor=executor, training=replace(FP64, epochs=2), privacy=CLIPS)
    clients = fed.clients()
    starts = starts_of(fed)
    anchor = starts_of(fed)[0] + 1.0

    def pull(p, batch, anchor):
        return 2.0 / 2 * (p - anchor).square().sum()

    trained = clients.sgd(clients.loss, per_client(starts), penalty=pull, anchor=anchor)
    for k, start in enumerate(starts):
        assert_close(trained[k], by_hand(fed, start, k, anchor, lam=2.0), 1e-12)


@both_executors
def test_a_penalty_that_looks_at_the_samples_is_clipped_with_their_loss(executor):
    fed = Federation(executor=executor, training=replace(FP64, steps=1), privacy=replace(CLIPS, clip=1e-3))
    clients = fed.clients()

    def strong(p, batch):
        return 1e6 * clients.loss(p, batch)

    moved = unmarked(clients.sgd(clients.loss, clients.initial, penalty=strong)) - clients.initial
    most = sampled_order(clients._group.keys("batches  1"), np.array(fed.sizes), 4, 1, 1).counts[:, 0]
    assert (moved.norm(dim=1) <= torch.from_numpy(most) * 1e-3 * fed.training.lr / 4 + 1e-15).all()


@both_executors
def test_without_noise_and_without_a_limit_it_is_ordinary_sgd_on_the_same_batches(executor):
    fed = Federation(executor=executor, sizes=(8, 4, 12, 8))
    clients = fed.clients()
    group = clients._group
    keys = clients._group.keys("batches")
    visits = epoch_order(keys, np.array(fed.sizes), 4, 3)
    rows = group.models(clients.initial)
    local = LocalLoss(fed.model, clients.loss)
    samples = group.samples("train")
    training = GroupTraining(local, rows, samples, visits, group.update(), group.draws(), {})
    without_limit = replace(training, update=group.update(rule=NoisySum(math.inf, 0.0, 4)))
    executor = fed.context.executor
    assert_close(executor.sgd(without_limit)[0], executor.sgd(training)[0], 1e-12)


def test_poisson_batches_draw_every_sample_independently_with_the_same_chance():
    keys = np.random.default_rng(0).integers(0, 2**63, 3).astype(np.uint64)
    visits = sampled_order(keys, np.array([40, 400, 5]), 8, steps=4000)
    assert visits.steps.tolist() == [4000] * 3

    for k, (n, rate) in enumerate([(40, 0.2), (400, 0.02), (5, 1.0)]):
        counts = visits.counts[k]
        assert counts.mean() == pytest.approx(n * rate, rel=0.02)
        assert counts.var() == pytest.approx(n * rate * (1 - rate), rel=0.1)
        batches = [visits.index[k, s, : counts[s]] for s in range(4000)]
        assert all((np.diff(batch) > 0).all() for batch in batches), "a sample is twice in a batch"
        often = np.bincount(np.concatenate(batches), minlength=n) / 4000
        assert abs(often - rate).max() < 5 * math.sqrt(rate * (1 - rate) / 4000) + 1e-12

    alone = sampled_order(keys[1:2], np.array([400]), 8, steps=4000)
    assert (alone.counts[0] == visits.counts[1]).all()


def test_a_private_training_has_the_steps_of_one_that_is_not():
    training = replace(FP64, epochs=2, batch_size=4, smallest_batch=3)
    fed = Federation(sizes=(7, 9, 2), training=training, privacy=CLIPS)
    order = prepare_training(fed.clients()._group, None, None, None, "").order
    assert order.steps.tolist() == fed.clients().num_steps().tolist() == [4, 4, 2]


@both_executors
def test_noise_has_the_set_deviation_and_is_new_in_every_training_and_step(executor):
    far = replace(NOISY, noise=1e9, clip=1e-9)
    fed = Federation(executor=executor, training=replace(FP64, lr=1.0, steps=1), privacy=far)
    clients = fed.clients()
    rows = [unmarked(clients.sgd(clients.loss, clients.initial)) - clients.initial for _ in range(20)]
    two_steps = unmarked(fed.clients().sgd(clients.loss, clients.initial, steps=2)) - clients.initial
    draws = torch.cat([*rows, two_steps - rows[0]])

    assert float(draws.std()) == pytest.approx(1 / 4, rel=0.03)
    assert float(draws.mean()) == pytest.approx(0, abs=0.01)
    correlation = torch.corrcoef(draws) - torch.eye(len(draws), dtype=draws.dtype)
    assert float(correlation.abs().max()) < 0.5, "two draws are the same"


def test_a_client_whose_poisson_batch_is_empty_takes_a_step_of_noise():
    trained = []
    for executor in EXECUTORS:
        fed = Federation(executor=executor, training=replace(FP64, batch_size=1, steps=20), privacy=NOISY)
        clients = fed.clients()
        assert (prepare_training(clients._group, None, None, None, "").order.counts == 0).any()
        trained.append(unmarked(fed.clients().sgd(clients.loss, clients.initial)))
    assert_close(trained[0], trained[1], 1e-12)


def test_noise_on_a_gpu_is_standard_normal_and_a_key_always_draws_the_same():
    like = torch.empty(3, 200_000)
    rows = device_rng.normal(torch.tensor([7, 8, 2**62]), like)
    assert torch.equal(device_rng.normal(torch.tensor(8), like[1]), rows[1])

    # The largest distance from the normal distribution is below Kolmogorov's bound at a level of one in a thousand.
    expected = (torch.arange(200_000) + 0.5) / 200_000
    for row in rows:
        assert float((torch.special.ndtr(row.sort().values) - expected).abs().max()) < 1.95 / math.sqrt(200_000)
    pairs = torch.stack([*rows, rows[0].roll(1), rows[1].square(), rows[2].square()])
    assert float((torch.corrcoef(pairs) - torch.eye(6)).abs().max()) < 4 / math.sqrt(200_000)


@both_executors
def test_two_steps_on_a_mini_batch_have_different_noise_and_are_accounted_together(executor):
    fed = Federation(executor=executor, training=replace(FP64, steps=3), privacy=NOISY, method=PFedMe(inner_steps=2))
    fed.run_rounds(None)
    rows = fed.cohorts[-1].spent
    assert {(row.branch, row.steps, row.uses) for row in rows} == {("train 1", 3, 2)}
    assert [row.rate for row in sorted(rows)] == [min(1.0, 4 / n) for n in fed.sizes]


def test_each_branch_is_accounted_with_its_own_steps_whatever_the_groups():
    spent = []
    for size in (None, 1):
        method = Ditto(personal_epochs=3)
        fed = Federation(privacy=NOISY, method=method, group_size=size, training=replace(FP64, batch_size=4))
        fed.run_rounds([0, 2], None)
        spent.append(sorted(fed.cohorts[0].spent) + sorted(fed.cohorts[1].spent))
    assert spent[0] == spent[1]
    assert [(row.client, row.branch, row.steps) for row in spent[0][:2]] == [(0, "train 1", 6), (0, "train 2", 2)]


@pytest.mark.parametrize("method", [FedNH(), FedProto(), MTL()], ids=["fednh", "fedproto", "mtl"])
def test_a_method_that_reads_training_data_without_noise_is_refused(method):
    fed = Federation(privacy=NOISY, method=method)
    if isinstance(method, MTL):
        fed.run_rounds(None)  # it trains by clients.sgd only
    else:
        with pytest.raises(Exception, match="reads clients' data without noise"):
            fed.run_rounds(None)


REFUSED = {"batches", "class_means", "evaluate", "grad", "label_counts", "losses", "map", "vjp"}
"""What a method may not use of `clients` if samples are protected."""

CALLS = {
    "complete": lambda complete: complete(STEEP),
    "compute": lambda f: f(lambda rows: [rows + 1], torch.arange(4.0)),
    "generators": lambda f: [g.initial_seed() for g in f("stream")],
    "log": lambda f: f(lr=torch.ones(4)),
    "logits": lambda f: f(STEEP, torch.ones(2, *SHAPE, dtype=torch.float64)),
    "loss": lambda f: f(STEEP, Batch(torch.ones(1, *SHAPE).double(), torch.tensor([1]), torch.ones(1).double())),
    "num_steps": lambda f: f(),
    "other": lambda f: f(STEEP).theta,
    "pool": lambda f: [*next(iter(f("auxiliary").batches(3)))],
    "randn": lambda f: f(3),
    "state": list,
    "weights": lambda f: f("samples"),
}
"""How each name of `clients` that is not a plain value is asked what it tells."""

STEEP = torch.linspace(-1, 1, 183, dtype=torch.float64)


def other_contents(**options) -> Federation:
    """Return a federation with the same sizes, in which every sample and label is different."""
    fed = Federation(**options)
    indices = slice(0, sum(fed.sizes))
    fed.inputs[indices] = 16 - fed.inputs[indices]
    fed.labels[indices] = (fed.labels[indices] + 1) % CLASSES
    return fed


def test_every_public_name_of_clients_is_refused_under_noise_or_reveals_nothing_of_the_samples():
    clients, twins = (make(privacy=NOISY).clients() for make in (Federation, other_contents))
    plain = Federation().clients()
    names = {name for name in dir(plain) if not name.startswith("_")}
    assert names == WITHOUT_CONTENTS | WITH_NOISE | REFUSED, "a name is new: does it read clients' samples?"

    for name in REFUSED:
        with pytest.raises(PrivacyError, match=rf"^clients\.{name} reads clients' data without noise"):
            getattr(clients, name)
        getattr(plain, name)

    for name in WITHOUT_CONTENTS - {"model", "networks"}:  # the same function of a vector for all
        ask = CALLS.get(name, lambda value: value)
        answer, twin_answer = (ask(getattr(group, name)) for group in (clients, twins))
        if isinstance(answer, Tensor):
            assert torch.equal(answer, twin_answer), name
        else:
            assert str(answer) == str(twin_answer), name

    batch = next(clients.minibatches())
    assert {name for name in dir(batch) if not name.startswith("_")} == {"active", "grad", "step"}
    with pytest.raises(PrivacyError, match=r"^batch\.grad reads clients' data without noise"):
        batch.grad(clients.loss, STEEP)
    with pytest.raises(MethodError, match="perturb takes two gradients of each batch"):
        clients.sgd(clients.loss, STEEP, perturb=torch.add)


def test_every_public_name_of_a_cohort_is_classified_and_what_is_measured_without_noise_is_for_the_record_only():
    closed = {"losses", "logged"}
    open_names = {
        *("context", "exchange", "failed", "ids", "lr", "phase", "present", "round", "spent", "task", "unseen"),
        *("descend", "generator", "log", "log_image", "log_table", "other", "pool", "progress", "rows", "run", "sgd"),
        *("logits", "num_exchanges", "run_everyone", "with_rows"),
    }
    fed = Federation(privacy=NOISY, method=FedAvg())
    fed.run_rounds(None)

    assert {name for name in dir(fed.cohorts[0]) if not name.startswith("_")} == closed | open_names

    for privacy in (NOISY, replace(NOISY, unit="client"), PrivacySettings(secure_aggregation=True)):
        cohort = Federation(privacy=privacy, method=FedAvg()).cohort()
        for name in closed:
            with pytest.raises(PrivacyError, match=rf"^cohort\.{name} was measured without noise and masks"):
                getattr(cohort, name)


class SendsItsLosses(FedAvg):
    """FedAvg whose clients weigh themselves by how well they trained."""

    def train(self, clients, theta):
        trained = clients.sgd(clients.loss, theta)
        return {"theta": Mean(trained, weight=1 / clients.losses)}


class SendsItsAccuracy(FedAvg):
    """FedAvg whose clients send how well the model fits their samples."""

    def train(self, clients, theta):
        return super().train(clients, theta) | {"fit": Mean(clients.evaluate(theta, split="train")["accuracy"])}


class WeighsByLosses(FedAvg):
    """FedAvg whose server looks at every client's training loss."""

    def round(self, server, cohort):
        super().round(server, cohort)
        server["worst"] = max(cohort.losses.values())


class Tracking(torch.nn.Module):
    """A network whose normalisation keeps running statistics, without mixing samples."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.InstanceNorm2d(2, track_running_stats=True)
        self.head = torch.nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x).flatten(1))


@pytest.mark.parametrize("method", [FedAvg(), PFedMe()], ids=["sgd", "batch.step"])
def test_batch_statistics_without_noise_are_refused(method):
    fed = Federation(factory=Tracking, executor="sequential", privacy=NOISY, method=method)
    with pytest.raises(PrivacyError, match="Training moved statistics of the network"):
        fed.run_rounds(None)


def test_the_orders_of_the_accountant_are_those_of_opacus():
    source = Path(find_spec("opacus").origin).with_name("accountants") / "rdp.py"
    assigned = [node for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.Assign)]
    (orders,) = [ast.unparse(node.value) for node in assigned if ast.unparse(node.targets[0]) == "DEFAULT_ALPHAS"]
    assert eval(orders) == ORDERS


@pytest.mark.thorough
def test_the_accountant_is_above_the_exact_curve_and_close_to_published_values():
    # Abadi et al. 2016, Section 3.2: q = 0.01, sigma = 4, 10,000 steps, delta = 1e-5: 1.26 by the moments accountant;
    # the newer conversion is tighter.
    assert 0.95 < epsilon({(0.01, 4.0): 10_000}, 1e-5) < 1.26
    # PerAda, Table 5, at noise 0.8, 1 and 1.5: 10 epochs of batches of 32, 20 clients.
    sizes = np.random.default_rng(0).dirichlet(np.full(20, 0.1), 10).sum(0) * 4500
    for noise, low, high in [(0.8, 4.9, 8.3), (1.0, 3.0, 5.0), (1.5, 1.5, 2.5)]:
        spent = [epsilon({(min(1, 32 / n), noise): 10 * math.ceil(n / 32)}, 1e-5) for n in sizes.clip(20)]
        assert low < np.mean(spent) < high

    # Balle and Wang 2018: the exact curve of T Gaussian steps; Renyi's bound is above it, by little.
    for steps, noise in [(1, 1.0), (10, 3.0)]:
        mu = math.sqrt(steps) / noise
        spent = epsilon({(1.0, noise): steps}, 1e-5)
        assert _exact_delta(spent, mu) < 1e-5 < _exact_delta(0.8 * spent, mu)


def _exact_delta(eps: float, mu: float) -> float:
    def below(z: float) -> float:
        return 0.5 * math.erfc(-z / math.sqrt(2))

    return below(-eps / mu + mu / 2) - math.exp(eps) * below(-eps / mu - mu / 2)


def test_epsilon_grows_with_steps_and_rate_falls_with_noise_and_composes():
    base = epsilon({(0.1, 1.0): 100}, 1e-5)
    assert epsilon({(0.1, 1.0): 200}, 1e-5) > base > epsilon({(0.1, 1.5): 100}, 1e-5)
    assert epsilon({(0.2, 1.0): 100}, 1e-5) > base > epsilon({(0.1, 1.0): 100}, 1e-4)
    assert epsilon({(0.1, 1.0): 60, (0.1, 1.0000001): 40}, 1e-5) == pytest.approx(base, rel=1e-5)
    assert epsilon({(0.1, 0.0): 1}, 1e-5) == math.inf and epsilon({}, 1e-5) == 0.0

    rows = [(r, "training", 7, b, 0.1, 50, 1) for r in (1, 2) for b in ("train 1", "train 2")]
    rows += [(r, "prediction", 7, "personal model 1", 0.1, 50, 1) for r in (1, 2)]
    names = ("round", "phase", "client", "branch", "rate", "steps", "uses")
    table = accounted({n: list(v) for n, v in zip(names, zip(*rows, strict=True), strict=True)}, NOISY)
    spent = dict(zip(table["branch"], zip(table["steps"], table["epsilon"], strict=True), strict=True))

    assert spent["train 1"] == (100, pytest.approx(base)) and spent["personal model 1"][0] == 50
    assert spent[ALL] == (250, pytest.approx(epsilon({(0.1, 1.0): 250}, 1e-5)))


def user_level(**changes) -> Federation:
    settings = PrivacySettings(noise=0.0, clip=0.05, unit="client")
    return Federation(privacy=replace(settings, **changes), method=FedAvg(weighting="uniform"))


def test_a_clients_whole_update_is_clipped_and_the_servers_noise_scales_with_the_clip():
    plain = Federation(method=FedAvg(weighting="uniform"))
    start = plain.method.start(plain.task)["theta"]
    fed = user_level()
    clients = plain.clients(round=0)
    updates = unmarked(clients.sgd(clients.loss, start)) - start

    assert (updates.norm(dim=1) > 0.05).all()
    limited = updates * (0.05 / updates.norm(dim=1, keepdim=True))
    assert_close(fed.run_rounds(None)["theta"], start + limited.mean(0), 1e-12)

    noise = user_level(noise=100.0).run_rounds(None)["theta"] - fed.server["theta"]
    assert float(noise.std()) == pytest.approx(100 * 0.05 / 4, rel=0.1)
    assert_close(user_level(clip=1e9).run_rounds(None)["theta"], plain.run_rounds(None)["theta"], 1e-12)


def test_a_client_spends_an_epsilon_for_each_round_in_which_it_took_part_without_amplification_by_sampling():
    fed = user_level(noise=3.0)
    fed.run_rounds([0, 1, 3], [0, 3], [0])
    spent = epsilons_of((row for cohort in fed.cohorts for row in cohort.spent), fed.privacy)
    assert spent == {client: epsilon({(1.0, 3.0): rounds}, 1e-5) for client, rounds in ((0, 3), (1, 1), (3, 2))}


def test_replies_that_the_server_cannot_clip_are_refused():
    for method, match in [
        (FedAvg(), "Return the Mean without a weight, by method.weighting=uniform where"),
        (PerAda(steps=2, batch_size=4), "'logits', which is not the mean of an argument"),
        (FedProto(), "which is not the mean of an argument"),
    ]:
        fed = Federation(method=method, privacy=replace(NOISY, unit="client"))
        with pytest.raises(Exception, match=match):
            fed.run_rounds(None)


def experiment(tmp_path, *assignments: str) -> Experiment:
    base = [
        "name=private",
        f"output={tmp_path}",
        "rounds=2",
        "cohort.size=4",
        "partition.clients=6",
        "privacy.noise=1.0",
    ]

    return Experiment().override([*base, "engine.backend=inline", "evaluation.every=1", *assignments])


def test_batch_norm_is_refused_before_the_run(tmp_path):
    with pytest.raises(ConfigError, match=r"privacy.noise is 1.0, but batch norm in resnet10"):
        run(experiment(tmp_path, "model=resnet10"))
    with pytest.raises(ConfigError, match=r"privacy.clip is .inf, but privacy.noise is 1.0"):
        experiment(tmp_path, "privacy.clip=.inf")


@pytest.mark.thorough
def test_a_run_reports_the_epsilon_of_each_client_and_a_resume_keeps_it(tmp_path):
    # Each number of samples costs the accountant a quarter of a second.
    equal_sizes = "partition={name: iid, clients: 6}"
    changes = ["method=fedavg-ft", equal_sizes, "checkpoint.every=1", "evaluation.every=0"]
    result = run(experiment(tmp_path, *changes, "rounds=3"))
    shorter = run(experiment(tmp_path, *changes, "rounds=2"))
    resumed = resume(shorter.run_dir, overrides=["rounds=3"])

    assert resumed.weights_hash == result.weights_hash and resumed.privacy == result.privacy
    assert shorter.privacy != result.privacy
    table = Result.load(result.run_dir).privacy.to_pydict()
    participants = [c for row in result.rounds["cohort"].to_pylist() for c in row]

    assert set(table["branch"]) >= {"train 1", ALL}
    sizes = {c: s for c, b, s in zip(table["client"], table["branch"], table["steps"], strict=True) if b == "train 1"}
    assert set(sizes) == set(participants)

    for client, steps in sizes.items():
        assert steps % participants.count(client) == 0
    assert all(0 < value < 100 for value in table["epsilon"])


@pytest.mark.thorough
def test_a_new_clients_model_is_trained_privately_and_reports_its_epsilon(tmp_path):
    changes = ["method=fedavg-ft", "method.finetune_epochs=2", "evaluation.every=0", "training.batch_size=4"]
    models = raypfl.trained_models(run(experiment(tmp_path, *changes)).run_dir)
    x = np.zeros((12, 1, 8, 8), np.uint8)
    y = np.arange(12) % 3
    new_models = models.personalize_all([(x, y), (x[:9], y[:9])], held_out=1 / 3)

    assert [new_model.epsilon for new_model in new_models] == [
        epsilon({(4 / 8, 1.0): 4}, 1e-5),
        epsilon({(4 / 6, 1.0): 4}, 1e-5),
    ]
    assert json.loads(json.dumps(new_models[0].facts))["epsilon"] == new_models[0].epsilon
    plain = raypfl.trained_models(run(experiment(tmp_path, *changes, "privacy.noise=null")).run_dir)
    assert plain.personalize(x, y).epsilon is None


def test_the_privacy_of_a_run_is_a_sentence_that_names_its_trainings(tmp_path):
    (group,) = group_runs([run(experiment(tmp_path, "method=ditto", "evaluation.every=0"))])
    rows = {row.training: row for row in epsilons(group)}
    assert list(rows) == ["model 1 of train", "model 2 of train", "all"]

    whole = rows["all"]
    step_row = rows["model 1 of train"]
    assert privacy_sentence(group) == (
        f"ditto, privacy of one sample of a client: epsilon {whole.mean:.2f} at delta 1e-05, the mean over clients "
        f"(standard deviation {whole.std:.2f}, largest {whole.most:.2f}). Mean epsilon of each training alone: "
        f"model 1 of train {step_row.mean:.2f}, model 2 of train {step_row.mean:.2f}."
    )


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        (["privacy.unit=client"], r"^FedAvg\.train .*by method\.weighting=uniform"),
        (["method=fednh"], "reads clients' data without noise"),
        (["method=knn-per"], "clients.map reads clients' data without noise"),
        (["method=pfedhn", "privacy.secure_aggregation=true"], "'step' as a row for each client"),
        (["privacy.secure_aggregation=true", "cohort.size=1"], "has only one client"),
        (["method=tests.learning.test_privacy:SendsItsLosses"], "clients.losses reads clients' data without noise"),
        (["method=tests.learning.test_privacy:SendsItsAccuracy"], "clients.evaluate reads clients' data without noise"),
        (["method=tests.learning.test_privacy:WeighsByLosses"], "cohort.losses was measured without noise"),
        (["method=fedptr"], "clients.batches reads clients' data without noise"),
        (
            ["method=fedptr", "method.pictures=5", "privacy.noise=null", "privacy.secure_aggregation=true"],
            "returned 'pictures' with zeros, or a weight of zero, for all clients of the cohort but one",
        ),
        (
            ["method=ifca", "privacy.noise=null", "privacy.secure_aggregation=true"],
            r"^IFCA\.train .* returns 'model_0' as a mean to which no client, or only one, may contribute",
        ),
    ],
    ids=[
        *("weights", "its round", "its prediction", "rows", "a cohort of one"),
        *("losses", "fit", "losses on the server", "own images", "pictures", "clusters"),
    ],
)
def test_a_method_that_breaks_privacy_is_refused_before_anything_is_written(tmp_path, settings, match):
    refused = experiment(tmp_path, *settings)
    with pytest.raises(ConfigError, match=match):
        run(refused)
    with pytest.raises(ConfigError, match=match):
        check([refused])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("method", ["fedpac", "ifca", "q-ffl", "pefll", "apfl", "extra-images"])
def test_methods_that_read_samples_in_another_way_are_refused_under_noise_as_the_page_says(tmp_path, method):
    with pytest.raises(ConfigError, match="reads clients' data without noise"):
        check([experiment(tmp_path, f"method={method}")])


def test_ifca_with_one_cluster_needs_sums_only(tmp_path):
    secure = ["privacy.noise=null", "privacy.secure_aggregation=true"]
    check([experiment(tmp_path, "method=ifca", "method.clusters=1", *secure)])


@pytest.mark.parametrize("options", [["apfl", "adaptive=false"], ["fedptr", "initial=noise"]], ids=str)
def test_their_variants_that_read_no_samples_are_accepted_under_noise(tmp_path, options):
    method, option = options
    check([experiment(tmp_path, f"method={method}", f"method.{option}")])
