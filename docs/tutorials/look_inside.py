# %% [markdown]
# # Look inside a run
#
# This page shows how to look into a round: who took part, what was sent, how to log more, and how to stop in the middle
# of it.

# %%
import raypfl
from raypfl import Mean
from raypfl.engine.events import Evaluated, RoundFinished
from raypfl.methods import FedAvg

# %% [markdown]
# ## Listen
#
# A listener is a function that you write. It is called in this process, with every [event](../reference/runs.md) of a
# run.


# %%
def listen(event):
    if isinstance(event, RoundFinished):
        print(f"round {event.round}: loss {event.loss:.3f}, {event.clients} clients, {event.bytes_up:,} bytes up")
    if isinstance(event, Evaluated):
        print(f"  accuracy {event.summary[0]['accuracy']:.3f}")


experiment = raypfl.Experiment(
    method="fedavg", rounds=4, cohort={"size": 5}, evaluation={"every": 2}, engine={"backend": "inline"}
)
result = raypfl.run(experiment, listeners=[listen])

# %% [markdown]
# `raypfl.MLflowListener()` is such a function, which [records runs in MLflow](../tracking.md). A
# listener that raises `raypfl.common.errors.Stopped` when a checkpoint is complete stops the run.
#
# ## Who took part, and what was sent
#
# The ledger has a row for each message. It is written where messages are sent, so a method cannot
# leave one out.

# %%
print(result.rounds["cohort"].to_pylist())
result.ledger.to_pandas()

# %% [markdown]
# ## Log from a method
#
# A subclass of a method can log numbers, tables and images. This one logs how far clients move from the global model.


# %%
class Measured(FedAvg):
    """FedAvg that logs how far clients move, and how far their mean does."""

    def round(self, server, cohort):
        before = server["theta"]
        super().round(server, cohort)
        cohort.log(moved=(server["theta"] - before).norm())

    def train(self, clients, theta):
        reply = super().train(clients, theta)
        clients.log(client_moved=(reply["theta"].rows - theta).norm(dim=1))
        return reply


measured = raypfl.run(experiment.replace(method=Measured()))
assert measured.weights_hash == result.weights_hash  # looking changes nothing
measured.logged.to_pandas().pivot(index="round", columns="name", values="value")

# %% [markdown]
# Clients move farther than their mean does: they pull in different directions.
#
# ## Stop in the middle
#
# With `engine.backend=inline`, everything runs in this process, so a `breakpoint()` in `round` or
# `train` stops there. With `engine.executor=sequential`, clients train one by one, and a loss can
# print its numbers:


# %%
class Printed(FedAvg):
    """FedAvg whose loss prints what it sees."""

    def train(self, clients, theta):
        def loss(p, batch):
            value = clients.loss(p, batch)
            print(f"clients {list(clients.ids)}: {len(batch.y)} samples, loss {value.item():.3f}")
            return value

        return {"theta": Mean(clients.sgd(loss, theta, steps=1), weight=clients.num_samples)}


changes = ["rounds=1", "cohort.size=3", "evaluation.every=0", "engine.executor=sequential"]
printed = raypfl.run(experiment.replace(method=Printed()).override(changes))

# %% [markdown]
# A mistake in a method ends the run, and the error shows your lines and the client:


# %%
class Mistaken(FedAvg):
    """A method with a mistake."""

    def train(self, clients, theta):
        return {"theta": Mean(clients.sgd(clients.loss, theta)[:, 0:5])}


try:
    raypfl.run(experiment.replace(method=Mistaken()))
except raypfl.RaypflError as error:
    print(error)

# %% [markdown]
# ## What stays on disk
#
# A run's folder has its settings, tables and checkpoints. `raypfl.resume(folder)` continues the run,
# and `Result.load` reads it.

# %%
print(sorted(file.name for file in result.run_dir.iterdir()))
longer = raypfl.resume(result.run_dir, overrides=["rounds=6"])
assert longer.weights_hash == raypfl.run(experiment.override(["rounds=6"])).weights_hash

# %% [markdown]
# The run of four rounds, extended to six, has the same bits as a run of six rounds.
# [Architecture](../architecture.md) explains why.
