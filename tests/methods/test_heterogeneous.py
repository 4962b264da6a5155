"""Clients with networks of different architectures: methods that average none of them work as they are."""

from __future__ import annotations

import json

import numpy as np
import pyarrow.compute as pc
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import raypfl
from raypfl.common.errors import ConfigError
from raypfl.engine.prepared import Prepared
from raypfl.methods.partial_models.shared_part import SharedPart
from raypfl.models.architectures.heterogeneous import AverageFeatures, architectures_of
from raypfl.runs.choices.turn import turn_of
from raypfl.storage.states import StateTable
from tests.support.federation import both_executors
from tests.support.runs import ON_RAY, TIMED, Interrupt, experiment, same_tables

METHODS = ["local", "lg-fedavg", "fedproto", "fedgh", "feddistill"]
STATE = {"local": "personal", "lg-fedavg": "personal", "fedproto": "model", "fedgh": "personal", "feddistill": "model"}


class SmallConv(nn.Module):
    """A convolution and a dense output layer on 36 features."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int):
        super().__init__()
        self.conv = nn.Conv2d(input_shape[0], 4, 3, stride=2)
        self.head = nn.Linear(36, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x).relu().flatten(1))


NETWORKS = f"[{{name: mlp, hidden: [7, 6]}}, '{__name__}:SmallConv']"
TWO = {"model": "heterogeneous", "model__networks": NETWORKS, "rounds": 3, "partition__clients": 7, "cohort__size": 5}
BRIEF = TWO | {"training__steps": 2}
BY_HAND = TWO | {"training__precision": "fp64", "training__batch_size": 2000, "training__lr": 0.1, "rounds": 2}
BY_HAND |= {"cohort__size": 7, "training__epochs": 1}


def prepared(settings: raypfl.Experiment) -> Prepared:
    return Prepared(settings, settings.load_data())


class ByHand(nn.Module):
    """A client's own network, written out: an MLP, or a convolution whose 36 features are averaged in sixes."""

    def __init__(self, number: int):
        super().__init__()
        self.number = number
        if number == 0:
            self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 7), nn.ReLU(), nn.Linear(7, 6), nn.ReLU())
        else:
            self.body = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(6, 10)
        self.double()

    def features(self, x: Tensor) -> Tensor:
        z = self.body(x)
        return z if self.number == 0 else z.unflatten(1, (6, 6)).mean(2)

    def vector(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.parameters()])

    def step(self, loss: Tensor) -> None:
        for p, gradient in zip(self.parameters(), torch.autograd.grad(loss, list(self.parameters())), strict=True):
            p.data -= 0.1 * gradient


def networks_by_hand(of_run: Prepared) -> list[ByHand]:
    networks = []
    for client in range(7):
        network = ByHand(client % 2)
        vector = of_run.architectures[client % 2].init(of_run.experiment.seed)
        nn.utils.vector_to_parameters(vector, network.parameters())
        networks.append(network)
    return networks


@both_executors
def test_lg_fedavg_is_a_loop_over_two_kinds_of_networks_that_averages_their_output_layers(executor, tmp_path):
    settings = experiment(tmp_path, **BY_HAND, method="lg-fedavg", engine__executor=executor)
    result = raypfl.run(settings)

    of_run = prepared(settings)
    networks = networks_by_hand(of_run)
    sizes = of_run.task.num_samples / of_run.task.num_samples.sum()
    head = networks[0].vector()[-70:]
    for _ in range(2):
        mean = torch.zeros_like(head)
        for client, network in enumerate(networks):
            nn.utils.vector_to_parameters(torch.cat([network.vector()[:-70], head]), network.parameters())
            x, y, _ = of_run.training_samples(client)
            network.step(F.cross_entropy(network.head(network.features(x)), y))
            mean += sizes[client] * network.vector()[-70:]
        head = mean

    torch.testing.assert_close(result.server_state()["theta"], head, rtol=1e-12, atol=1e-12)
    for client, network in enumerate(networks):
        body = torch.from_numpy(result.client_state(client)["personal"])
        torch.testing.assert_close(body, network.vector()[:-70], rtol=1e-12, atol=1e-12)


@both_executors
def test_fedproto_is_a_loop_over_two_kinds_of_networks_that_averages_mean_features(executor, tmp_path):
    settings = experiment(tmp_path, **BY_HAND, method="fedproto", method__lam=0.7, engine__executor=executor)
    result = raypfl.run(settings)

    of_run = prepared(settings)
    networks = networks_by_hand(of_run)
    means = torch.zeros(10, 6, dtype=torch.float64)
    for _ in range(2):
        sums = torch.zeros_like(means)
        owners = torch.zeros(10, 1, dtype=torch.float64)
        for client, network in enumerate(networks):
            x, y, _ = of_run.training_samples(client)
            z = network.features(x)
            pulls = [(z[y == c].mean(0) - means[c]).square().sum() for c in y.unique() if means[c].any()]
            network.step(F.cross_entropy(network.head(z), y) + 0.7 * sum(pulls) / max(len(pulls), 1))
            z = network.features(x).detach()
            for c in y.unique():
                sums[c] += z[y == c].mean(0)
                owners[c] += 1
        means = torch.where(owners > 0, sums / owners.clamp_min(1), means)

    torch.testing.assert_close(result.server_state()["means"], means, rtol=1e-12, atol=1e-12)
    for client, network in enumerate(networks):
        model = torch.from_numpy(result.client_state(client)["model"])
        torch.testing.assert_close(model, network.vector(), rtol=1e-12, atol=1e-12)


@both_executors
@pytest.mark.parametrize("method", METHODS)
def test_one_architecture_is_an_ordinary_run_to_the_bit(method, executor, tmp_path):
    changes = {"method": method, "rounds": 2, "engine__executor": executor, "partition__clients": 5, "cohort__size": 3}
    plain = raypfl.run(experiment(tmp_path, **changes, model__hidden="[6]"))
    alone = raypfl.run(
        experiment(tmp_path, **changes, model="heterogeneous", model__networks="[{name: mlp, hidden: [6]}]")
    )

    is_personal = pc.field("model") == "personal"
    assert alone.evaluations.equals(plain.evaluations.filter(is_personal)) and alone.ledger.equals(plain.ledger)
    for client in range(5):
        state = alone.client_state(client)
        expected = plain.client_state(client)
        assert state.keys() == expected.keys() and all(np.array_equal(state[name], expected[name]) for name in state)


@pytest.mark.parametrize("method", METHODS)
def test_a_client_keeps_and_is_its_own_network_alone(method, tmp_path):
    result = raypfl.run(experiment(tmp_path, **BRIEF, method=method, evaluation__every=0))
    sizes = {0: 64 * 7 + 7 + 7 * 6 + 6, 1: 4 * 9 + 4}
    models = raypfl.trained_models(result.run_dir)
    data = prepared(result.experiment).data
    for client in range(7):
        state = result.client_state(client)
        keeps_head = method in ("local", "fedproto", "feddistill")
        if state:
            assert {len(state[STATE[method]])} == {sizes[client % 2] + 70 * keeps_head}

        network = models.personal_model(client)
        assert sum(p.numel() for p in network.network.parameters()) == sizes[client % 2] + 70
        x, y = map(torch.from_numpy, data.take(data.indices(client, "test")))
        accuracy = (network(x).argmax(1) == y).double().mean().item()
        row = (pc.field("client") == client) & (pc.field("protocol") == "local")
        assert result.evaluations.filter(row)["accuracy"].to_pylist() == pytest.approx([accuracy])
    if method != "local":
        assert set(result.ledger["numbers"].to_pylist()) <= {10, 70, 100} | {
            size * c for size in (6, 10) for c in range(11)
        }


@pytest.mark.parametrize("method", METHODS)
def test_a_run_that_is_stopped_resumes_to_the_same_bits(method, tmp_path):
    changes = BRIEF | {"method": method, "checkpoint__every": 1}
    whole = raypfl.run(experiment(tmp_path, **changes))
    stopped = raypfl.run(experiment(tmp_path, **changes), listeners=[Interrupt(2)])
    resumed = raypfl.resume(stopped.run_dir)
    assert resumed.weights_hash == whole.weights_hash and same_tables(resumed, whole)


def test_executors_agree_up_to_rounding(tmp_path):
    changes = BRIEF | {"method": "fedgh", "training__precision": "fp64", "training__batch_size": 10}
    runs = [raypfl.run(experiment(tmp_path, **changes, engine__executor=e)) for e in ("vectorised", "sequential")]
    thetas = [run.server_state()["theta"] for run in runs]
    torch.testing.assert_close(*thetas, rtol=1e-10, atol=1e-10)


@pytest.mark.thorough
def test_client_actors_give_the_bits_of_an_inline_run(tmp_path):
    changes = BRIEF | {"method": "fedproto"}
    hashes = {raypfl.run(experiment(tmp_path, **changes, **backend)).weights_hash for backend in ({}, ON_RAY)}
    assert len(hashes) == 1


def test_a_method_that_averages_whole_networks_is_refused_with_those_that_do_not(tmp_path):
    words = r"'fedavg', which exchanges .*'body\.1\.weight', but model is heterogeneous.*feddistill, fedgh, fedproto, l"
    with pytest.raises(ConfigError, match=words):
        raypfl.run(experiment(tmp_path, **TWO, method="fedavg"))
    with pytest.raises(ConfigError, match="'ditto', which exchanges"):
        raypfl.run(experiment(tmp_path, **TWO, method="ditto"))
    with pytest.raises(ConfigError, match=r"the server has only the output layer.*'body'"):
        raypfl.run(experiment(tmp_path, **TWO, method="partial", method__personal="body"))
    personal = {"method": "partial", "method__personal": "feature extractor"}
    assert raypfl.run(experiment(tmp_path, **BRIEF, **personal)).status == "finished"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model__lora": 2}, "model.lora is for one network"),
        ({"model__networks": "[]"}, "model.networks is empty"),
        ({"model__shares": "[1]"}, "model.shares has 1 numbers and model.networks 2"),
        ({"model__shares": "[0, 0]"}, "not all 0"),
        ({"model__networks": "[{name: mlp, hiden: [3]}]"}, "model.hiden is not an option of mlp"),
        ({"model__networks": "[{name: mlp, lora: 3}]"}, "no settings but their own options"),
        ({"analyses": "[ntk]"}, "analyses compare models of one network"),
    ],
)
def test_what_different_networks_cannot_have_is_refused_in_a_sentence(changes, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        experiment(tmp_path, **TWO | changes)


def test_there_is_no_global_model_and_none_for_a_client_of_an_unknown_architecture(tmp_path):
    result = raypfl.run(experiment(tmp_path, **BRIEF, method="lg-fedavg"))
    models = raypfl.trained_models(result.run_dir)
    assert set(result.evaluations["model"].to_pylist()) == {"personal"}
    with pytest.raises(ConfigError, match="no global model"):
        models.global_model()
    with pytest.raises(ConfigError, match="which of its networks a new client would have"):
        models.personalize(np.zeros((2, 1, 8, 8)), np.array([0, 1]))
    metadata = json.loads((result.run_dir / "metadata.json").read_text())
    assert metadata["architectures"] == [
        {"parameters": 573, "clients": [0, 2, 4, 6]},
        {"parameters": 110, "clients": [1, 3, 5]},
    ]


@pytest.mark.parametrize("method", ["local", "lg-fedavg"])
def test_clients_that_are_never_trained_get_models_of_their_own_architecture(method, tmp_path):
    unseen = {"data__unseen_fraction": 0.3, "evaluation__protocols": "[local, unseen]", "evaluation__every": 0}
    result = raypfl.run(experiment(tmp_path, **BRIEF | unseen, method=method))
    rows = result.evaluations.filter(pc.field("protocol") == "unseen")
    clients = rows["client"].to_pylist()
    assert len(clients) == 2 and rows["accuracy"].null_count == 0
    for client in clients:
        network = raypfl.trained_models(result.run_dir).personal_model(client)
        assert sum(p.numel() for p in network.network.parameters()) == (573, 110)[client % 2]


def test_states_of_different_sizes_are_copied_out_of_stacks_that_few_clients_keep_alive(tmp_path, monkeypatch):
    changes = BRIEF | {"method": "local", "cohort__size": 2, "rounds": 6, "engine__group_size": 7}
    as_they_are = raypfl.run(experiment(tmp_path, **changes))
    rewritten = []

    def everyone(table: StateTable) -> list[list[int]]:
        rewritten.append(sorted(table._committed))
        return [rewritten[-1]] if rewritten[-1] else []

    monkeypatch.setattr(StateTable, "clients_to_rewrite", everyone)
    copied = raypfl.run(experiment(tmp_path, **changes))
    assert copied.weights_hash == as_they_are.weights_hash and len(rewritten[-1]) > 2


def test_simulated_time_counts_the_multiplications_of_each_clients_own_network(tmp_path):
    settings = experiment(tmp_path, **TWO | TIMED, method="lg-fedavg")
    loads = turn_of(prepared(settings)).loads
    multiplications = np.array([64 * 7 + 7 * 6 + 60, 36 * 9 + 60])
    assert loads.messages.tolist() == [1.0] * 7
    np.testing.assert_allclose(loads.work, (multiplications / multiplications.max())[np.arange(7) % 2])


class Heads(SharedPart):
    """Averages output layers; a group whose clients were sent different ones would get the first."""

    def personal_part(self, model):
        return model.mask("feature extractor")

    def train(self, clients, shared):
        trained = clients.sgd(clients.loss, self.received(clients, shared))
        return self.sent(clients, trained, clients.num_samples)


def test_asynchronous_clients_train_in_one_group_only_if_two_of_the_same_network_can(tmp_path):
    changes = TWO | TIMED | {"method": f"{__name__}:Heads", "asynchronous__buffer": 3, "training__precision": "fp64"}
    changes |= {"engine__group_size": 9, "rounds": 5, "partition__clients": 9}
    settings = experiment(tmp_path, **changes, engine__executor="vectorised")
    largest = np.argsort(-prepared(settings).task.num_samples)[:2]
    assert largest[0] % 2 != largest[1] % 2, "the two largest clients have different networks"
    together, one_by_one = (
        raypfl.run(experiment(tmp_path, **changes, engine__executor=executor)).server_state()["theta"]
        for executor in ("vectorised", "sequential")
    )
    torch.testing.assert_close(together, one_by_one, rtol=1e-10, atol=1e-10)


def test_batch_norm_in_any_network_is_refused_under_noise_but_not_where_output_layers_are_compressed(
    tmp_path,
):
    smaller_has_batch_norm = {"model__networks": "[{name: mlp, hidden: [64]}, {name: resnet10, width: 4}]"}
    changes = TWO | {"method": "lg-fedavg", "rounds": 1, "training__smallest_batch": 2} | smaller_has_batch_norm
    with pytest.raises(ConfigError, match="batch norm in heterogeneous mixes the samples"):
        raypfl.run(experiment(tmp_path, **changes, privacy__noise=0.5))
    compressed = changes | {"model__networks": "[{name: resnet10, width: 4}]", "compression": "qsgd"}
    assert raypfl.run(experiment(tmp_path, **compressed)).status == "finished"


def test_a_lone_sample_is_refused_only_for_a_client_whose_own_network_has_batch_norm(tmp_path):
    networks = ["{name: mlp, hidden: [7]}", "{name: resnet10, width: 4}"]
    changes = {"model": "heterogeneous", "method": "local", "partition": "{name: iid, clients: 2}", "cohort__size": 2}
    first, second = prepared(experiment(tmp_path, **changes)).data.sizes("train")
    assert first == second + 1
    changes |= {"training__batch_size": second, "rounds": 1}  # which leaves the first client one sample
    assert raypfl.run(experiment(tmp_path, **changes, model__networks=f"[{', '.join(networks)}]")).status == "finished"
    with pytest.raises(ConfigError, match=f"client 0's {first} training samples leave one"):
        raypfl.run(experiment(tmp_path, **changes, model__networks=f"[{', '.join(networks[::-1])}]"))


@pytest.mark.parametrize(("inputs", "outputs"), [(36, 6), (10, 4), (3, 7), (5, 5)])
def test_features_are_averaged_as_by_adaptive_average_pooling(inputs, outputs):
    z = torch.randn(3, inputs, dtype=torch.float64)
    averages = AverageFeatures(inputs, outputs).double()(z)
    torch.testing.assert_close(averages, F.adaptive_avg_pool1d(z, outputs), rtol=1e-14, atol=1e-14)


def test_clients_have_the_networks_in_turn_or_by_their_shares():
    networks = {"networks": ["mlp", "cnn", "lenet"]}
    assert architectures_of(networks, 7).tolist() == [0, 1, 2, 0, 1, 2, 0]
    by_share = architectures_of(networks | {"shares": [2, 1, 1]}, 40)
    assert np.bincount(by_share).tolist() == [20, 10, 10]
    assert architectures_of(networks | {"shares": [0, 1, 0]}, 3).tolist() == [1, 1, 1]
