# %% [markdown]
# # A model for a new client
#
# A model is trained with the clients that are there. Later another one comes, with a few labelled
# samples of its own, and wants a model too. FedRep shares a representation and gives each client an
# output layer: a new client needs to train only that.

# %%
import torch

import raypfl
from raypfl.data import load_federated

experiment = raypfl.Experiment(
    method={"name": "fedrep", "personal_epochs": 3, "unseen_epochs": 20},
    data={"name": "digits", "unseen_fraction": 0.2},
    partition={"name": "classes_per_client", "clients": 30, "classes": 2},
    rounds=15,
    evaluation={"every": 5, "protocols": ["local", "unseen"]},
    engine={"backend": "inline"},
)
result = raypfl.run(experiment)
result

# %% [markdown]
# `data.unseen_fraction` keeps a fifth of the clients out of training. The protocol `unseen` makes a
# model for each of them after training, and tests it on samples that it was not made from: that is
# how good the method is for new clients.
#
# ## From samples to a model
#
# Here is one of them, as a client who was not in the run at all: images, as they are stored, and
# labels.

# %%
data = load_federated(experiment.data, experiment.partition, seed=experiment.seed)
newcomer = data.unseen[0]
x, y = data.take(data.indices(newcomer, "train"))
print(x.shape, x.dtype, sorted({*y.tolist()}))

models = raypfl.trained_models(result.run_dir)
made = models.personalize(x, y, held_out=0.25)
print(f"{made.samples} samples, {made.held_out} held out, {made.seconds:.2f} s: {made.metrics['accuracy']:.2f} correct")

# %% [markdown]
# The global model has the same representation, and the output layer that nobody trained for this
# client:

# %%
x_test, y_test = (torch.as_tensor(part) for part in data.take(data.indices(newcomer, "test")))
with torch.no_grad():
    for name, network in [("made for it", made.model), ("global", models.global_model())]:
        print(f"{name:12} {(network(x_test).argmax(1) == y_test).float().mean():.2f}")

# %% [markdown]
# ## Take it along
#
# The file needs neither the run nor its data, and holds tensors only: no code.

# %%
file = made.save("mine.safetensors")
model = raypfl.load_model(file)
assert torch.equal(model(x_test), made.model(x_test))

# %% [markdown]
# On the command line: `raypfl personalize RUN --data samples.npz --out mine.safetensors`; for
# clients elsewhere, `raypfl serve RUN`. [Models for new clients](../new_clients.md) has all methods
# that have a way, and what each does.
#
# Next: [look inside](look_inside.md).
