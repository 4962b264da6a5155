"""Objectives: losses against torch's, metrics against scikit-learn's, and runs that learn numbers and text."""

from __future__ import annotations

import itertools
from typing import ClassVar

import numpy as np
import pytest
import sklearn.metrics
import torch
from torch import nn
from torch.nn import functional as F

import raypfl
from raypfl.common.errors import ClientError, ConfigError, DataError, MethodError
from raypfl.data import IID, ByColumn, load_federated
from raypfl.data.datasets import DataConfig, Population, RawData
from raypfl.evaluation import Measures, summarise
from raypfl.evaluation.inference import ModelOutputs
from raypfl.evaluation.metric_sums import MetricSums
from raypfl.learning.objectives import (
    Classification,
    MultiLabel,
    NextToken,
    Objective,
    OverAll,
    Regression,
    SampleMean,
)
from raypfl.learning.objectives.batch import Batch
from raypfl.methods import FedAvg
from raypfl.models import MODELS
from tests.support.federation import (
    Federation,
    as_module,
    as_vector,
    assert_close,
    both_executors,
    torch_sgd,
)
from tests.support.runs import experiment

DRAWS = torch.Generator().manual_seed(0)
CASES = {
    "classification": (Classification(), torch.randn(6, 3, generator=DRAWS), torch.tensor([0, 2, 1, 1, 0, 2])),
    "multi-label": (MultiLabel(), torch.randn(6, 3, generator=DRAWS), torch.randint(0, 2, (6, 3), dtype=torch.int8)),
    "regression": (Regression(), torch.randn(6, 2, generator=DRAWS), torch.randn(6, 2, generator=DRAWS)),
    "sum": (Regression(reduction="sum"), torch.randn(6, 1, generator=DRAWS), torch.randn(6, generator=DRAWS)),
    "next-token": (
        NextToken(),
        torch.randn(6, 5, 4, generator=DRAWS),
        torch.randint(-1, 4, (6, 5), generator=DRAWS),
    ),
}


def torchs(name: str, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    match name:
        case "classification":
            return F.cross_entropy(outputs, y)
        case "multi-label":
            return F.binary_cross_entropy_with_logits(outputs, y.float())
        case "regression":
            return F.mse_loss(outputs, y)
        case "sum":
            return F.mse_loss(outputs[:, 0], y, reduction="sum") / 2

    return F.cross_entropy(outputs.transpose(1, 2), y, ignore_index=-1)


@pytest.mark.parametrize("name", CASES)
def test_losses_are_torchs_leave_padding_out_and_are_vectorised(name):
    objective, outputs, y = CASES[name]
    batch = Batch(outputs, y, torch.ones(6))
    torch.testing.assert_close(objective.loss(outputs, batch), torchs(name, outputs, y))
    padded = batch._replace(weight=torch.tensor([1.0, 1, 1, 1, 0, 0]))
    torch.testing.assert_close(objective.loss(outputs, padded), torchs(name, outputs[:4], y[:4]))
    two = [torch.stack([t, t.flip(0)]) for t in (outputs, y, padded.weight)]
    together = torch.vmap(lambda o, y, w: objective.loss(o, Batch(o, y, w)))(*two)
    torch.testing.assert_close(together[0], torchs(name, outputs[:4], y[:4]))


def test_the_features_of_a_sequence_are_the_mean_over_its_tokens_whatever_it_is_filled_to():
    objective = NextToken()
    features = torch.randn(2, 5, 3, generator=DRAWS)
    y = torch.tensor([[4, 2, 7, -1, -1], [-1, -1, -1, -1, -1]])
    of_samples = objective.features_of_samples(features, y)
    torch.testing.assert_close(of_samples, torch.stack([features[0, :3].mean(0), torch.zeros(3)]))
    shorter = objective.features_of_samples(features[:, :3], y[:, :3])
    torch.testing.assert_close(of_samples, shorter)


def judged(objective: Objective, outputs, y, cuts=(2, 5), targets: int = 1, extra=()) -> dict[str, float]:
    """Every metric of one model, its answers in several batches."""
    metric_sums = MetricSums(Measures(objective, extra, targets))
    ends = [0, *cuts, len(y)]
    parts = [(slice(a, b)) for a, b in itertools.pairwise(ends)]
    sums = metric_sums.accumulate(
        [ModelOutputs(slice(0, 1), outputs[None, part], y[None, part], None) for part in parts], 1
    )
    return dict(zip(metric_sums.measures.columns, metric_sums.values(sums)[0].tolist(), strict=True))


def test_metrics_of_numbers_are_scikit_learns_in_the_targets_own_units():
    objective = Regression(mean=7.0, std=3.0)
    y = 7 + 3 * torch.randn(40, 2, generator=DRAWS)
    outputs = (y - 7) / 3 + 0.3 * torch.randn(40, 2, generator=DRAWS)
    scores = judged(objective, outputs, y, targets=2)
    predicted = 3 * outputs + 7

    assert scores["mse"] == pytest.approx(sklearn.metrics.mean_squared_error(y, predicted), rel=1e-5)
    assert scores["mae"] == pytest.approx(sklearn.metrics.mean_absolute_error(y, predicted), rel=1e-5)
    assert scores["r2"] == pytest.approx(sklearn.metrics.r2_score(y, predicted), rel=1e-5)
    assert scores["loss"] == pytest.approx(scores["mse"] / 9, rel=1e-5)


class MedianError(OverAll):
    """The median of the absolute errors."""

    name: ClassVar[str] = "median_error"

    def of_all(self, outputs, targets):
        return (outputs - targets).abs().median()


def test_a_metric_of_all_outputs_gets_them_in_the_targets_own_units():
    y = 7 + 3 * torch.randn(41, 1, generator=DRAWS)
    outputs = torch.randn(41, 1, generator=DRAWS)
    row = judged(Regression(mean=7.0, std=3.0), outputs, y, extra=(MedianError(),))
    assert row["median_error"] == pytest.approx(float((3 * outputs + 7 - y).abs().median()), rel=1e-6)


def test_numbers_that_are_all_the_same_have_no_coefficient_of_determination():
    assert np.isnan(judged(Regression(), torch.randn(6, 1), torch.full((6,), 150.0))["r2"])


def test_perplexity_is_that_of_the_tokens_that_are_there():
    _, outputs, y = CASES["next-token"]
    scores = judged(NextToken(), outputs, y, targets=4)
    assert scores["perplexity"] == pytest.approx(float(torchs("next-token", outputs, y).exp()), rel=1e-5)
    assert scores["accuracy"] == pytest.approx(float((outputs.argmax(-1) == y)[y >= 0].float().mean()), rel=1e-5)


def test_of_what_should_be_small_the_worst_decile_has_the_largest():
    columns = {"protocol": ["local"] * 20, "model": ["global"] * 20, "samples": [1] * 20}
    columns |= {"mse": list(range(20)), "loss": [0.0] * 20, "mae": [1.0] * 20, "r2": [None] * 19 + [0.5]}
    (row,) = summarise(Measures(Regression()), columns)
    assert row["worst_decile"] == 18.5 and row["mse"] == row["weighted"] == 9.5 and row["r2"] == 0.5


def small_regressor() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(32, 4), nn.Tanh(), nn.Linear(4, 1))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@both_executors
def test_numbers_are_learnt_as_a_bare_loop_learns_them(executor, reduction):
    fed = Federation(small_regressor, executor=executor, method=FedAvg())
    fed.labels = np.random.default_rng(2).normal(size=len(fed.labels))
    fed.context.measures = Measures(Regression(reduction=reduction))
    clients = fed.clients()
    trained = clients.sgd(clients.loss, clients.initial, lr=0.01)

    def loss(outputs, y):
        # Regression's "sum" is half the sum of squares.
        scale = 1 if reduction == "mean" else len(y) / 2
        return scale * F.mse_loss(outputs[:, 0], y)

    for k in range(len(clients)):
        net = as_module(small_regressor, fed.context.initial)
        torch_sgd(net, fed.visits(k), lr=0.01, loss=loss)
        assert_close(trained[k], as_vector(net))


@pytest.mark.parametrize(
    ("objective", "size", "is_told"),
    [(Regression(), 1000, True), (Regression(), 1, False), (Regression(std=1000.0), 1000, False)],
)
def test_training_that_diverges_on_large_targets_is_told_the_setting_that_scales_them(objective, size, is_told):
    fed = Federation(small_regressor)
    fed.labels = size * np.random.default_rng(2).normal(size=len(fed.labels))
    fed.context.measures = Measures(objective)
    clients = fed.clients()
    with pytest.raises(ClientError, match="Training diverged") as refused:
        clients.sgd(clients.loss, clients.initial, lr=1e9)
    targets = np.concatenate(
        [fed.labels[fed.context.split(client, "train")] for client in range(fed.context.num_clients)]
    )
    setting = (
        f"standardise them: 'objective={{name: regression, mean: {targets.mean():.4g}, std: {targets.std():.4g}}}'"
    )
    assert (setting in str(refused.value)) is is_told
    assert ("standardise" in str(refused.value)) is is_told


def test_what_counts_classes_is_refused_in_a_sentence_where_there_are_none():
    fed = Federation(small_regressor)
    fed.labels = np.random.default_rng(2).normal(size=len(fed.labels))
    clients = fed.clients()
    with pytest.raises(MethodError, match=r"clients\.label_counts counts classes, but the targets here are numbers"):
        clients.label_counts()
    with pytest.raises(MethodError, match=r"clients.class_means counts classes.*objectives: ClassVar"):
        clients.class_means(lambda theta, x: x, clients.initial)


# ------------------------------------------------------------------------------------------------------------ data
def lines(config: DataConfig) -> RawData:
    """240 points on a plane in 5 dimensions, far from 0 and on scales of their own."""
    draws = np.random.default_rng(0)
    x = draws.normal(size=(240, 5)) * [1, 10, 100, 0.1, 1] + [5, -50, 1e4, 0, 0]
    return RawData(x, ((x - x.mean(0)) / x.std(0)) @ [1.0, 2, -1, 0.5, 0], ["height"])


def of_lines(tmp_path, **changes) -> raypfl.Experiment:
    options = {"data__name": f"{__name__}:lines", "partition": "iid", "partition__clients": 4, "cohort__size": 4}
    return experiment(tmp_path, **{**options, "training__lr": 0.1, "training__batch_size": 10, "rounds": 9, **changes})


def test_features_are_stored_as_they_are_and_seen_normalised_each_on_its_own(tmp_path):
    data = load_federated(DataConfig(name=f"{__name__}:lines"), IID(clients=4), seed=0, cache=tmp_path)
    assert data.inputs.dtype == data.labels.dtype == np.float64 and data.input_shape == (5,) and data.kind == "numbers"
    trained = np.concatenate([data.indices(client, "train") for client in range(4)])
    np.testing.assert_allclose(data.mean, data.inputs[trained].mean(0), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(data.std, data.inputs[trained].std(0), rtol=1e-6)


def test_a_run_learns_numbers_and_says_no_word_of_accuracy(tmp_path):
    result = raypfl.run(of_lines(tmp_path, evaluation__protocols="[local,global,train]"))
    (ditto,) = [r for r in result.summary() if (r["protocol"], r["model"]) == ("local", "personal")]
    assert ditto["mse"] < 0.5 and ditto["r2"] > 0.8
    assert result.evaluations.column_names[4:] == ["samples", "mse", "loss", "mae", "r2"]
    assert isinstance(result.experiment.objective, Regression)
    trained = {r["model"]: r["mse"] for r in result.summary() if r["protocol"] == "train"}
    assert set(trained) == {"personal", "global"} and trained["personal"] < trained["global"]


def test_the_protocol_train_is_the_objective_on_clients_own_training_samples(tmp_path):
    result = raypfl.run(of_lines(tmp_path, method="fedavg", evaluation__protocols="[train]"))
    data = load_federated(result.experiment.data, result.experiment.partition, seed=0)
    rows = {row["client"]: row for row in result.evaluations.to_pylist() if row["round"] == 9}
    model = raypfl.trained_models(result.run_dir).global_model()
    for client in range(4):
        x, y = (torch.from_numpy(part) for part in data.take(data.indices(client, "train")))
        assert rows[client]["mse"] == pytest.approx(float(F.mse_loss(model(x)[:, 0].double(), y).detach()), rel=1e-4)


@pytest.mark.parametrize("partition", ["dirichlet", "dirichlet_mix", "classes_per_client"])
def test_partitions_by_class_refuse_other_targets_in_a_sentence(tmp_path, partition):
    with pytest.raises(ConfigError, match=f"partition is '{partition}', which divides samples by class, but"):
        raypfl.run(of_lines(tmp_path, partition=partition))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"method": "fednh"}, "method is 'fednh', which learns the objective 'classification', but that of"),
        ({"objective": "classification"}, "objective is 'classification', which is for one class a sample, int64"),
        (
            {"evaluation__metric": "accuracy", "evaluation__protocols": "[local, val]", "data__val_fraction": 0.2},
            "evaluation.metric is 'accuracy', which the objective 'regression' does",
        ),
        ({"evaluation__protocols": "[pm_v]"}, "evaluation.protocols has 'pm_v', which needs one class"),
        (
            {"data__augmentation": "[flip]"},
            "data.augmentation is for images, but the samples of .* are 5; leave",
        ),
        ({"model": "cnn"}, r"The cnn model takes images, but samples here are \[5\]; use mlp."),
        ({"objective": "{name: regression, std: 0}"}, "objective.std is 0.*; it must be above 0."),
    ],
)
def test_what_does_not_fit_numbers_is_refused_in_a_sentence(tmp_path, changes, sentence):
    with pytest.raises(ConfigError, match=sentence):
        raypfl.run(of_lines(tmp_path, **changes))


def test_targets_that_are_no_numbers_are_refused_where_they_stand():
    with pytest.raises(DataError, match="Sample 1 has label nan"):
        RawData(np.zeros((2, 3)), np.array([1.0, np.nan]), ["height"])


class Planes(Population):
    """Clients whose samples lie on a plane, made where they are at work."""

    num_clients = 4
    num_classes = 1
    input_shape = (3,)
    kind = "numbers"

    def sizes(self, split: str) -> np.ndarray:
        return np.full(4, 30 if split == "train" else 10)

    def samples(self, client: int, split: str) -> tuple[np.ndarray, np.ndarray]:
        x = np.random.default_rng([client, len(split)]).normal(size=(int(self.sizes(split)[client]), 3))
        return x, x @ [1.0, -1.0, 2.0]


def test_a_population_may_have_targets_that_are_numbers(tmp_path):
    training = {"training__lr": 0.05, "training__batch_size": 10}
    result = raypfl.run(experiment(tmp_path, data__name=f"{__name__}:Planes", cohort__size=4, **training))
    (row,) = [r for r in result.summary() if (r["protocol"], r["model"]) == ("local", "global")]
    assert row["r2"] > 0.8


# ------------------------------------------------------------------------------------------------- of one's own
class Within(SampleMean):
    """The share of predictions that are off by at most `reach`."""

    reach: float = 0.5
    name: ClassVar[str] = "within"
    heading: ClassVar[str] = "within\nreach"
    percent: ClassVar[bool] = True

    def each(self, scores):
        return (scores.errors.abs() <= self.reach).all(-1)


class Absolute(Objective):
    """Numbers, by their absolute error."""

    targets: ClassVar[str] = "numbers"

    def losses(self, outputs, targets):
        return (outputs[..., 0] - targets).abs()


class Focal(Classification):
    """Cross-entropy that counts what is known already less (Lin et al. 2017)."""

    gamma: float = 2.0

    def losses(self, outputs, targets):
        cross_entropy = super().losses(outputs, targets)
        return (1 - (-cross_entropy).exp()) ** self.gamma * cross_entropy


class Smoothed(Classification):
    """Cross-entropy with label smoothing, as torch has it for the outputs of one model."""

    def losses(self, outputs, targets):
        return F.cross_entropy(outputs, targets, reduction="none", label_smoothing=0.1)


class SmoothedTokens(NextToken):
    """The same for tokens."""

    def surprises(self, outputs, targets):
        tokens = targets.clamp_min(0)
        return F.cross_entropy(outputs.transpose(1, 2), tokens, reduction="none", label_smoothing=0.1)


class Rare(MultiLabel):
    """Binary cross-entropy in which positive labels count three times."""

    def losses(self, outputs, targets):
        positives = targets.to(outputs.dtype)
        return ((1 + 2 * positives) * (F.softplus(outputs) - positives * outputs)).mean(-1)


class Huber(Regression):
    """Squared error that grows linearly beyond `width`."""

    width: float = 0.7

    def losses_of_numbers(self, outputs, targets):
        return F.huber_loss(outputs, targets, reduction="none", delta=self.width)


@pytest.mark.parametrize("shape", [(6,), (6, 1), (6, 2)])
def test_a_loss_of_numbers_of_ones_own_gets_them_as_the_network_learns_them(shape):
    objective = Huber(mean=7.0, std=3.0)
    y = 7 + 3 * torch.randn(shape, generator=DRAWS)
    outputs = torch.randn(6, *shape[1:] or (1,), generator=DRAWS)
    expected = F.huber_loss(outputs, ((y - 7) / 3).view_as(outputs), delta=0.7)

    torch.testing.assert_close(objective.loss(outputs, Batch(outputs, y, torch.ones(6))), expected)
    row = judged(objective, outputs, y, targets=outputs.shape[1])
    assert row["loss"] == pytest.approx(float(expected), rel=1e-6)
    assert row["mse"] == pytest.approx(float(F.mse_loss(3 * outputs + 7, y.view_as(outputs))), rel=1e-6)


@pytest.mark.parametrize(
    ("objective", "name"),
    [
        (Focal(), "classification"),
        (Smoothed(), "classification"),
        (SmoothedTokens(), "next-token"),
        (Rare(), "multi-label"),
    ],
)
def test_the_loss_in_evaluations_is_the_one_that_an_objective_of_ones_own_trains(objective, name):
    packaged, outputs, y = CASES[name]
    row = judged(objective, outputs, y, targets=3)
    assert row["loss"] == pytest.approx(float(objective.loss(outputs, Batch(outputs, y, torch.ones(6)))), rel=1e-6)
    assert row["accuracy"] == judged(packaged, outputs, y, targets=3)["accuracy"]


def test_a_loss_of_sequences_that_training_would_not_take_is_refused():
    with pytest.raises(ConfigError, match=r"Smoothed\.losses would have no effect on training.* surprises"):

        class Smoothed(NextToken):
            def losses(self, outputs, targets):
                return super().losses(outputs, targets) + 1


def test_a_loss_of_scaled_targets_in_other_units_than_the_outputs_is_refused():
    with pytest.raises(ConfigError, match=r"Relative\.losses would get .*; define losses_of_numbers"):

        class Relative(Regression):
            def losses(self, outputs, targets):
                return ((outputs[:, 0] - targets) / targets).abs()


class OnAverage(Classification):
    """The mean over a batch, of which padding is a part."""

    def losses(self, outputs, targets):
        return F.cross_entropy(outputs, targets)


def test_a_loss_that_is_no_number_of_each_sample_is_refused_before_the_first_round(tmp_path):
    described = experiment(tmp_path, objective=f"{__name__}:OnAverage", evaluation__every=0)
    with pytest.raises(ConfigError, match=r"OnAverage\.losses returned \[\] for \d+ samples; it must return \[\d+\]"):
        raypfl.run(described)


def test_a_metric_of_ones_own_is_named_once_and_decides(tmp_path):
    metrics = f"[{{name: '{__name__}:Within', reach: 0.3}}]"
    changes = {"evaluation__metrics": metrics, "evaluation__metric": "within", "data__val_fraction": 0.2}
    result = raypfl.run(of_lines(tmp_path, **changes, evaluation__protocols="[local,val]"))
    rows = [row for row in result.evaluations.to_pylist() if (row["protocol"], row["model"]) == ("val", "personal")]
    by_round = {n: np.mean([row["within"] for row in rows if row["round"] == n]) for n in (3, 6, 9)}
    assert 0 < by_round[9] <= 1
    assert result.best_round == max(by_round, key=lambda n: (by_round[n], -n))
    assert raypfl.Result.load(result.run_dir).summary()[0]["within"] == result.summary()[0]["within"]


def test_a_run_is_not_resumed_with_other_metrics(tmp_path):
    result = raypfl.run(of_lines(tmp_path, rounds=3))
    with pytest.raises(ConfigError, match=r"evaluation.metrics is \[\] .* decides its result"):
        raypfl.resume(result.run_dir, overrides=["rounds=6", f"evaluation.metrics=['{__name__}:Within']"])


def test_an_objective_of_ones_own_says_the_loss_of_each_sample(tmp_path):
    result = raypfl.run(of_lines(tmp_path, objective=f"{__name__}:Absolute", method="fedavg"))
    assert result.evaluations.column_names[4:] == ["samples", "loss"]
    (row, _) = result.summary()
    assert row["loss"] < 0.5 and row["worst_decile"] >= row["loss"]


@pytest.mark.parametrize(
    ("each", "returned"),
    [
        (lambda self, scores: scores.errors, r"\[1, 2, 1\]"),
        (lambda self, scores: scores.errors[..., 0].numpy(), "a ndarray"),
        (lambda self, scores: None, "a NoneType"),
    ],
)
def test_a_metric_that_gives_something_else_than_numbers_of_samples_is_told_so(each, returned):
    class Wrong(SampleMean):
        name: ClassVar[str] = "wrong"

    Wrong.each = each
    message = f"The metric 'wrong' returned {returned} for 1 models and 2 samples; its each"
    with pytest.raises(MethodError, match=message):
        judged(Regression(), torch.randn(6, 1), torch.randn(6), extra=(Wrong(),))


@pytest.mark.parametrize(
    ("evaluation", "sentence"),
    [
        ({"metrics": ["nonsense"]}, "There is no metric called 'nonsense'"),
        ({"metric": "acuracy"}, "evaluation.metric is 'acuracy', which is not a metric; did you mean 'accuracy'?"),
    ],
)
def test_metrics_that_do_not_exist_are_refused_early(evaluation, sentence):
    with pytest.raises(ConfigError) as refused:
        raypfl.Experiment(evaluation=evaluation)
    assert sentence in str(refused.value)


def test_a_metric_that_the_objective_has_is_not_added_twice():
    with pytest.raises(ConfigError, match=r"evaluation\.metrics has 'mse', which models are judged by already"):
        raypfl.Experiment(objective="regression", evaluation={"metrics": ["mse"]})


# ------------------------------------------------------------------------------------------------------------ text
def folder_of_texts(path) -> str:
    for name, words in (("ada", "abcd "), ("bob", "dcba "), ("cyd", "aabb ")):
        (path / f"{name}.txt").write_text(40 * words + name)
    return str(path)


def test_each_text_is_a_client_and_the_target_is_the_text_one_character_on(tmp_path):
    config = DataConfig(name="text", root=folder_of_texts(tmp_path), options={"size": 16}, test_fraction=0.2)
    data = load_federated(config, ByColumn(), seed=0, cache=tmp_path)
    assert data.num_clients == 3 and data.kind == "tokens" and data.discrete and data.input_shape == (16,)

    for client, name in enumerate(("ada", "bob", "cyd")):
        indices = np.sort(np.concatenate([data.indices(client, split) for split in ("train", "test")]))
        x, y = data.take(indices)
        codes = np.array([data.class_names.index(character) for character in (tmp_path / f"{name}.txt").read_text()])
        assert x.ravel()[: len(codes) - 1].tolist() == codes[:-1].tolist()
        assert y.ravel()[: len(codes) - 1].tolist() == codes[1:].tolist()
        assert (y.ravel()[len(codes) - 1 :] == -1).all()


@pytest.mark.parametrize(
    ("model", "executor"),
    [
        ("{name: causal_cnn, width: 16, layers: 2}", "sequential"),
        ("{name: causal_cnn, width: 16, layers: 2}", "vectorised"),
        ("{name: gru, width: 32}", "auto"),
        ("{name: causal_transformer, width: 16, depth: 1, heads: 2}", "vectorised"),
    ],
)
def test_next_characters_are_learnt_and_own_models_know_their_writer(tmp_path, model, executor):
    changes = {"data": "text", "data__root": folder_of_texts(tmp_path), "data__size": 16, "partition": "by_column"}
    changes |= {"cohort__size": 3, "model": model, "training__lr": 0.5}
    described = experiment(tmp_path, **changes, partition__clients=0, engine__executor=executor, engine__group_size=3)
    result = raypfl.run(described)
    rows = {row["model"]: row for row in result.summary() if row["protocol"] == "local"}
    assert isinstance(result.experiment.objective, NextToken)
    assert rows["personal"]["accuracy"] > 0.8 and rows["personal"]["perplexity"] < rows["global"]["perplexity"]
    assert rows["personal"]["perplexity"] >= np.exp(rows["personal"]["loss"]) - 1e-6


@pytest.mark.parametrize("name", ["causal_cnn", "gru", "causal_transformer"])
def test_a_causal_network_does_not_look_ahead(name):
    net = MODELS.get(name)(input_shape=(12,), num_classes=5, width=8)
    x = torch.randint(0, 5, (1, 12), generator=DRAWS)
    other = x.clone()
    other[0, 7:] = (other[0, 7:] + 1) % 5
    before = net(x)
    after = net(other)
    assert torch.equal(before[:, :7], after[:, :7]) and not torch.equal(before[:, 7:], after[:, 7:])
