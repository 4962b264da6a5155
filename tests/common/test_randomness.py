"""A method's random draws are keyed by seed, round and client; other draws are refused."""

from __future__ import annotations

import importlib
import random
import sys
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import raypfl
from raypfl.common import rng
from raypfl.common.errors import MethodError, RaypflError
from raypfl.common.messages import Each
from raypfl.methods import FedAvg
from tests.support.federation import CLASSES, EXECUTORS, FP64, Federation, assert_close, bare_loop
from tests.support.runs import experiment


def test_a_clients_draws_depend_on_seed_round_stream_and_client_alone():
    fed = Federation()
    together = fed.clients([2, 0, 3], round=4)
    alone = fed.clients([0], round=4)
    noise = together.randn(3, 2, stream="noise")

    assert noise.shape == (3, 3, 2) and noise.dtype == torch.float64
    assert torch.equal(alone.randn(3, 2, stream="noise")[0], noise[1])

    different = [alone.randn(3, 2), fed.clients([0], round=5).randn(3, 2, stream="noise"), noise[:1]]
    different.append(Federation(seed=4).clients([0], round=4).randn(3, 2, stream="noise"))
    assert not any(torch.equal(other[0], noise[1]) for other in different)

    (generator,) = alone.generators("noise")
    assert torch.equal(torch.randn(3, 2, generator=generator, dtype=torch.float64), noise[1])
    assert not torch.equal(torch.randn(3, 2, generator=generator, dtype=torch.float64), noise[1])


def test_the_servers_draws_depend_on_seed_round_and_stream_alone():
    def draws(fed: Federation, stream: str = "") -> list[float]:
        return torch.rand(3, generator=fed.cohort().generator(stream)).tolist()

    fed = Federation()
    other = Federation(seed=4)
    first = draws(fed)
    assert draws(fed) == first == draws(Federation())
    fed.round += 1
    assert len({tuple(x) for x in (first, draws(fed), draws(other), draws(fed, "b"))}) == 4


STREAMS = {
    "torch": lambda: torch.randn(3),
    "numpy": lambda: np.random.rand(3),
    "python": lambda: random.random(),
    "seeding": lambda: torch.manual_seed(5),
}


class Draws(FedAvg):
    """FedAvg whose clients draw from a global stream."""

    stream: str = "torch"

    def train(self, clients, theta):
        STREAMS[self.stream]()
        return super().train(clients, theta)


class DrawsAtStart(FedAvg):
    """FedAvg that draws from a global stream before the first round."""

    def start(self, task):
        return super().start(task) | {"noise": torch.randn(3)}


class DrawsOnServer(FedAvg):
    """FedAvg whose server draws from a global stream in each round."""

    def round(self, server, cohort):
        super().round(server, cohort)
        server["theta"] = server["theta"] + 0 * torch.randn(())


class DrawsWhenJudged(FedAvg):
    """FedAvg that draws from a global stream for the model that a client is evaluated with."""

    def personal_model(self, clients, server):
        return server["theta"].repeat(len(clients), 1) + 0 * torch.randn(())


class DrawsKeyed(FedAvg):
    """FedAvg with keyed draws on server and clients, beside those of the engine and the network."""

    def round(self, server, cohort):
        super().round(server, cohort)
        noise = torch.randn(len(server["theta"]), generator=cohort.generator())
        server["theta"] = server["theta"] + 1e-3 * noise.to(server["theta"])

    def train(self, clients, theta):
        reply = super().train(clients, theta)
        return {**reply, "noise": Each(clients.randn(2))}


@pytest.mark.parametrize(
    ("stream", "whose"), [("torch", "torch"), ("numpy", "NumPy"), ("python", "Python"), ("seeding", "torch")]
)
def test_a_client_function_that_draws_from_a_global_stream_is_refused_with_the_keyed_call(stream, whose):
    fed = Federation(method=Draws(stream=stream))
    with pytest.raises(MethodError, match=rf"Draws\.train .* draws from {whose}'s global .*clients\.randn\("):
        fed.run_rounds(None)


@pytest.mark.parametrize(
    ("code", "whose"),
    [
        ("import numpy as np; np.random.rand()", "NumPy"),
        ("from numpy.random import rand; rand(312)", "NumPy"),  # 624 words: the position in them is the same again
        ("import random; random.random()", "Python"),
        ("noise()", "NumPy"),
    ],
)
def test_a_draw_by_what_a_function_imports_or_another_module_of_the_user_draws_is_refused_too(
    code, whose, tmp_path, monkeypatch
):
    (tmp_path / "my_noise.py").write_text("def noise():\n    import numpy\n    return numpy.random.rand()\n")
    (tmp_path / "my_drawing_method.py").write_text(
        "from my_noise import noise\n"
        "from raypfl.methods import FedAvg\n\n\n"
        "class Draws(FedAvg):\n"
        "    def train(self, clients, theta):\n"
        f"        {code}\n"
        "        return super().train(clients, theta)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("my_noise", "my_drawing_method"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    method = importlib.import_module("my_drawing_method").Draws()
    with pytest.raises(MethodError, match=rf"Draws\.train .* draws from {whose}'s global .*clients\.randn\("):
        Federation(method=method).run_rounds(None)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("DrawsAtStart", r"start .*manual_seed\(task\.seed\)"),
        ("DrawsOnServer", r"round .*cohort\.generator"),
        ("DrawsWhenJudged", r"personal_model .*clients\.generators"),
    ],
)
def test_start_round_and_personal_model_may_not_draw_from_a_global_stream(method, message, tmp_path):
    with pytest.raises(RaypflError, match=message):
        raypfl.run(experiment(tmp_path, rounds=1, method=f"{__name__}:{method}"))


def dropping() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(32, 8), nn.Dropout(0.4), nn.AlphaDropout(0.1), nn.Linear(8, CLASSES))


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.filterwarnings("ignore::raypfl.clients.context.FallbackWarning")
def test_dropout_and_keyed_draws_are_allowed(executor):
    fed = Federation(dropping, executor=executor, method=DrawsKeyed())
    first = fed.run_rounds(None)["theta"]
    torch.rand(7)
    again = Federation(dropping, executor=executor, method=DrawsKeyed()).run_rounds(None)["theta"]
    assert torch.equal(first, again)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("sizes", [(7, 4, 11), (8, 8, 8)], ids=["unequal", "equal"])
def test_noise_inside_a_loss_is_separate_for_each_client_and_warned_of(sizes, executor):
    def trained(ids: list[int]) -> tuple[Tensor, list[str]]:
        clients = Federation(executor=executor, sizes=sizes).clients(ids)

        def noisy(p, batch):
            return clients.loss(p, batch._replace(x=batch.x + 0.1 * torch.randn_like(batch.x)))

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            models = clients.sgd(noisy, clients.initial).as_subclass(Tensor)
        return models, [str(w.message) for w in caught]

    torch.manual_seed(1)
    models, messages = trained([0, 1, 2])
    torch.manual_seed(2)
    assert_close(trained([2])[0][0], models[2])
    if executor == "vectorised":
        assert len(messages) == 1 and ("draws random numbers" in messages[0] or "random" in messages[0])
        assert "batch.weight" not in messages[0]


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_noise_in_a_map_is_separate_for_each_client(executor):
    def mapped(ids: list[int]) -> Tensor:
        clients = Federation(executor=executor).clients(ids)
        return clients.map(lambda p, batch: p[0] + torch.randn(2), clients.initial).as_subclass(Tensor)

    assert torch.equal(mapped([0, 2, 3])[1], mapped([2])[0])


def test_the_check_for_global_draws_changes_no_training():
    fed = Federation(method=FedAvg(), training=replace(FP64, epochs=2))
    start = fed.model.init(fed.seed)
    expected = bare_loop(fed, start.expand(4, -1))[0]
    weights = torch.tensor(fed.sizes, dtype=torch.float64)
    assert_close(fed.run_rounds(None)["theta"], (expected * weights[:, None]).sum(0) / weights.sum())


def test_a_keyed_generator_draws_what_philox_draws_with_its_key():
    expected = np.random.Generator(np.random.Philox(key=rng.key(7, "cohort", 3)))
    assert (rng.generator(7, "cohort", 3).integers(2**63, size=9) == expected.integers(2**63, size=9)).all()
