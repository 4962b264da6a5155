"""Methods with the mistakes that their authors make at first; each class is named after its mistake."""

from __future__ import annotations

import torch

from raypfl import Mean, Method
from raypfl.methods import FedAvg


class Base(Method):
    """Federated averaging in its fewest lines, without a mistake."""

    def start(self, task):
        return {"theta": task.model.init(task.seed)}

    def round(self, server, cohort):
        server["theta"] = cohort.run(self.train, theta=server["theta"])["theta"]

    def train(self, clients, theta):
        return {"theta": Mean(clients.sgd(clients.loss, theta))}

    def global_model(self, server):
        return server["theta"]


class ForgetsToReturn(Base):
    def train(self, clients, theta):
        clients.sgd(clients.loss, theta)


class ReturnsAnotherKey(Base):
    def train(self, clients, theta):
        return {"model": Mean(clients.sgd(clients.loss, theta))}


class MistypesInRound(Base):
    def round(self, server, cohort):
        server["theta"] = cohort.run(self.train, theta=server["theta"])["thta"]


class ReturnsNoDict(Base):
    def train(self, clients, theta):
        return Mean(clients.sgd(clients.loss, theta))


class NoModel(Base):
    global_model = Method.global_model


class ShortGlobalModel(Base):
    def global_model(self, server):
        return server["theta"][:100]


class ShortPersonalModels(Base):
    def personal_model(self, clients, server):
        return server["theta"].repeat(len(clients) + 1, 1)


class RaisesInTrain(Base):
    def train(self, clients, theta):
        clients.sgd(self.loss_of(clients), theta)

    def loss_of(self, clients):
        return lambda p, batch: clients.loss(p, batch) + self.mu


class RaisesInTorch(Base):
    def train(self, clients, theta):
        return {"theta": Mean(clients.sgd(clients.loss, theta) @ torch.zeros(3, 3))}


class KeepsOnSelf(Base):
    def train(self, clients, theta):
        self.last = theta
        return super().train(clients, theta)


class SendsTooLittle(FedAvg):
    def train(self, clients, theta):
        reply = super().train(clients, theta)
        return {"theta": Mean(reply["theta"].rows[:, :-3])}


class TakesALogarithm(Base):
    """Its models are nan wherever a weight is negative."""

    def train(self, clients, theta):
        return {"theta": Mean(torch.log(clients.sgd(clients.loss, theta)))}


class DividesByZero(FedAvg):
    def personal_model(self, clients, server):
        return (server["theta"] / 0.0).expand(len(clients), -1)


class LacksADefault(FedAvg):
    def train(self, clients, theta):
        clients.state["personal"] = clients.sgd(clients.loss, theta)
        return super().train(clients, theta)

    def personal_model(self, clients, server):
        return clients.state.get("personal")


class SendsNumPy(FedAvg):
    def train(self, clients, theta):
        return {"theta": Mean(clients.sgd(clients.loss, theta).numpy())}


class KeepsANumber(FedAvg):
    def train(self, clients, theta):
        clients.state["share"] = 0.5


class DefaultsToANumber(FedAvg):
    def train(self, clients, theta):
        clients.state.get("share", default=0.5)


class PersonalInNumPy(FedAvg):
    def personal_model(self, clients, server):
        return server["theta"].expand(len(clients), -1).numpy()


class ReturnsNoModel(FedAvg):
    def personal_model(self, clients, server):
        server["theta"].expand(len(clients), -1)


class Overflows(FedAvg):
    def global_model(self, server):
        return server["theta"] * 1e25


class KeepsTooLittle(Base):
    global_model = Method.global_model

    def train(self, clients, theta):
        return {"theta": Mean(clients.sgd(clients.loss, theta)[:, :-3])}

    def personal_model(self, clients, server):
        return server["theta"].expand(len(clients), -1)


class LacksATypeHint(Base):
    gamma = 3.0
