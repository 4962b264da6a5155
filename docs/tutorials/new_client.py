# %% [markdown]
# # A model for a new client
#
# Training has ended, and a new client arrives. It has a few labelled samples of its own, and needs a
# model too. FedRep shares a representation and gives each client its own output layer, so a new client
# only has to train an output layer.

# %%
import torch

import raypfl

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
# `data.unseen_fraction` keeps a fifth of the clients out of training. After training, the protocol
# `unseen` makes a model for each of them and tests it on other samples than those it was made from.
# This measures how good the method is for new clients.
#
# ## From samples to a model
#
# Take one of these clients as if it had not been in the run at all: it has images, as they are stored,
# and labels.

# %%
data = experiment.load_data()
newcomer = data.unseen[0]
x, y = data.take(data.indices(newcomer, "train"))
print(x.shape, x.dtype, sorted({*y.tolist()}))

models = raypfl.trained_models(result)
made = models.personalize(x, y, held_out=0.25)
print(f"{made.samples} samples, {made.held_out} held out, {made.seconds:.2f} s: {made.metrics['accuracy']:.2f} correct")

# %% [markdown]
# The global model has the same representation, but its output layer was not trained for this client:

# %%
x_test, y_test = (torch.as_tensor(part) for part in data.take(data.indices(newcomer, "test")))
with torch.no_grad():
    for name, network in [("made for it", made.model), ("global", models.global_model())]:
        print(f"{name:12} {(network(x_test).argmax(1) == y_test).float().mean():.2f}")

# %% [markdown]
# ## Take it along
#
# The file needs neither the run nor its data. It holds only tensors, and no code.

# %%
file = made.save("mine.safetensors")
model = raypfl.load_model(file)
assert torch.equal(model(x_test), made.model(x_test))

# %% [markdown]
# On the command line, use `raypfl personalize RUN --data samples.npz --out mine.safetensors`, or
# `raypfl serve RUN` for clients on other machines. [Models for new clients](../new_clients.md) lists
# the methods that can do this, and how each does it.
#
# Next: [look inside](look_inside.py).
