"""A run in double precision refuses a method that would compute a part of its numbers in single precision."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import raypfl
from raypfl import Mean, Scatter
from raypfl.common.errors import RaypflError
from tests.support.mistaken_methods import Base
from tests.support.runs import experiment


class StartsInSingle(Base):
    def start(self, task):
        return {"theta": 0.99 * task.model.init(task.seed) + torch.full((task.model.size,), 0.01)}


class KeepsInSingle(Base):
    def train(self, clients, theta):
        share = clients.state.get("share", default=torch.full((1,), 0.1))
        clients.state["share"] = share
        return {"theta": Mean(clients.sgd(clients.loss, theta) * (1 - share))}


class WeighsFlagsInSingle(Base):
    def round(self, server, cohort):
        share = 0.1 * torch.ones(len(cohort), 1, dtype=torch.bool)
        server["theta"] = cohort.run(self.train_own, theta=Scatter((1 - share) * server["theta"]))["theta"]

    def train_own(self, clients, theta):
        return {"theta": Mean(clients.sgd(clients.loss, theta))}


class FillsInSingle(Base):
    def personal_model(self, clients, server):
        theta = server["theta"].repeat(len(clients), 1)
        theta[:, :3] = torch.full((3,), 0.1)
        return theta


class PullsInSingle(Base):
    def train(self, clients, theta):
        def pulled(p, batch):
            return clients.loss(p, batch) + torch.tensor(0.1) * p.square().sum()

        return {"theta": Mean(clients.sgd(pulled, theta))}


@pytest.mark.parametrize("executor", ["vectorised", "sequential"])
@pytest.mark.parametrize(
    ("method", "function"),
    [
        (StartsInSingle, "start"),
        (KeepsInSingle, "train"),
        (WeighsFlagsInSingle, "round"),
        (FillsInSingle, "personal_model"),
        (PullsInSingle, "train.pulled"),
    ],
)
def test_a_method_that_mixes_precisions_is_refused_with_its_line_in_double_precision_only(
    tmp_path: Path, executor: str, method: type, function: str
):
    changes = {"method": f"{__name__}:{method.__name__}", "engine__executor": executor, "rounds": 1}
    raypfl.run(experiment(tmp_path / "single", **changes))
    with pytest.raises(
        RaypflError, match=rf"(?s)torch\.float32.*zeros_like\(theta\).*in {method.__name__}\.{function}"
    ):
        raypfl.run(experiment(tmp_path / "double", training__precision="fp64", **changes))


class RecordsInSingle(Base):
    def round(self, server, cohort):
        super().round(server, cohort)
        norms = torch.zeros(3)
        norms[0] = server["theta"].norm()
        assert norms[0] == server["theta"].norm().float()


def test_numbers_may_be_written_into_a_table_of_single_precision(tmp_path: Path):
    raypfl.run(experiment(tmp_path, method=f"{__name__}:RecordsInSingle", training__precision="fp64", rounds=1))


@pytest.mark.parametrize("changes", [{}, {"model__hidden": [2]}, {"model": "cnn"}], ids=["mlp", "two features", "cnn"])
def test_fednh_computes_in_double_precision(tmp_path: Path, changes: dict):
    raypfl.run(experiment(tmp_path, method="fednh", training__precision="fp64", rounds=1, **changes))
