# %% [markdown]
# # A method of your own
#
# SCAFFOLD (Karimireddy et al. 2020) corrects client drift, which occurs when clients' data differ. The server and each
# client keep a *control variate*, an estimate of their gradient. A local step is
# `y ← y - lr · (gradient(y) - own + control)`. In raypfl, the method is one class.

# %%
import torch

import raypfl
from raypfl import Mean, Sum
from raypfl.methods import FedAvg


class Scaffold(FedAvg):
    """SCAFFOLD with option II for the control variates (Karimireddy et al. 2020, Algorithm 1)."""

    def start(self, task):
        state = super().start(task)
        return state | {"control": torch.zeros_like(task.model.parameters(state["theta"]))}

    def round(self, server, cohort):
        reply = cohort.run(self.train, theta=server["theta"], control=server["control"])
        server["theta"] = reply["theta"]
        server["control"] = server["control"] + reply["change"] / cohort.task.num_trained

    def train(self, clients, theta, control):
        own = clients.state.get("control", default=torch.zeros_like(control))
        trained = clients.sgd(clients.loss, theta, correction=control - own)
        moved = (theta - trained)[:, : len(control)] / (clients.num_steps() * clients.lr)[:, None]
        clients.state["control"] = own - control + moved
        return {"theta": Mean(trained), "change": Sum(moved - control)}


# %% [markdown]
# Read it from top to bottom:
#
# - `start` returns the server's state before the first round. FedAvg's state has the global model
#   `theta`, a flat vector.
# - `round` runs on the server. `cohort.run` calls a function on the clients that take part, and
#   returns their reply, in which everything marked with `Mean` is averaged, and with `Sum` added up.
# - `train` runs on the clients, for a group of K clients at once: `own` and `trained` are matrices
#   with a row for each client. `clients.state` is what each client keeps between rounds.
# - The global model is evaluated as in FedAvg, because the class inherits `global_model`.
#
# raypfl takes care of sampling, local SGD, states, checkpoints, evaluation and counting bytes.
#
# ## Does it learn?
#
# `engine.backend=inline` runs everything in this process. It gives the same bits, and allows
# breakpoints and `print`. A class that exists only in a notebook also runs on Ray, but for commands
# such as `raypfl run`, `resume` and `report`, put it into a file and name it:
# `method=my_methods:Scaffold`.

# %%
experiment = raypfl.Experiment(
    method=Scaffold(),
    rounds=20,
    partition={"name": "classes_per_client", "clients": 20, "classes": 2},
    cohort={"fraction": 0.5},
    training={"epochs": 2, "lr": 0.05},
    evaluation={"every": 5, "protocols": ["global"]},
    engine={"backend": "inline"},
)
scaffold = raypfl.run(experiment)
fedavg = raypfl.run(experiment.replace(method=FedAvg(weighting="uniform")))
for name, result in [("FedAvg", fedavg), ("SCAFFOLD", scaffold)]:
    print(f"{name:8} {result.summary()[0]['accuracy']:.3f}")

# %% [markdown]
# ## Is it right?
#
# Every method in raypfl has checks like these. **A limiting case**: in the first round, all control
# variates are zero, so SCAFFOLD must equal FedAvg, to the bit.

# %%
one = experiment.replace(rounds=1, evaluation={"every": 1})
first = raypfl.run(one)
assert first.evaluations.equals(raypfl.run(one.replace(method=FedAvg(weighting="uniform"))).evaluations)

# %% [markdown]
# **The count in the paper**: SCAFFOLD sends twice as much as FedAvg, in both directions. The ledger
# has a row for each message.

# %%
up, down = scaffold.megabytes
assert (up, down) == (2 * fedavg.megabytes[0], 2 * fedavg.megabytes[1])
print(f"{up:.1f} MB up, {down:.1f} MB down")
scaffold.ledger.slice(0, 4).to_pandas()

# %% [markdown]
# **An invariant**: the server's control variate is the mean of all clients' control variates,
# once all clients have taken part.

# %%
everybody = raypfl.run(experiment.override(["cohort.fraction=1", "rounds=3", "evaluation.every=0"]))
controls = torch.stack([torch.from_numpy(everybody.client_state(i)["control"]) for i in range(20)])
torch.testing.assert_close(everybody.server_state()["control"], controls.mean(0), rtol=1e-3, atol=1e-4)

# %% [markdown]
# **Another implementation**: the package has [SCAFFOLD](../methods.md) too. Its models are the same
# up to rounding, because sums are taken in another order.

# %%
packaged = raypfl.run(experiment.override(["method=scaffold"]))
torch.testing.assert_close(scaffold.global_model(), packaged.global_model(), rtol=1e-3, atol=1e-4)
(scaffold.global_model() - packaged.global_model()).abs().max()

# %% [markdown]
# ## What next
#
# [Write a method](../write_a_method.md) shows all that a method can do: personal models, several
# exchanges in a round, teachers, pools of public data, logged numbers and pictures. A
# hyperparameter is a line in the class (`mu: float = 0.1`), which makes it a setting.
#
# Next: [your own data and network](own_data.py).
