# %% [markdown]
# # Your own data and network
#
# Four hospitals measure the same two values, with instruments that are calibrated differently, and want to tell sick
# patients from healthy ones. You describe such data with a function, and a network with a class.
#
# ## Data
#
# A reader is a function that takes the settings of `data` and returns `RawData`: inputs, labels,
# the names of the classes and, if samples have an origin, a group for each sample. Its other
# parameters become options.

# %%
import numpy as np
import torch
from torch import nn

import raypfl
from raypfl.data.datasets import RawData


def hospitals(config, spread: float = 1.0):
    """Two classes in the plane, in four groups that are rotated against each other."""
    draws = np.random.default_rng(0)
    sick = draws.integers(0, 2, 2000)
    where = draws.integers(0, 4, 2000)
    points = draws.normal(size=(2000, 2)) * spread + 2 * np.stack([sick, 1 - sick], axis=1)
    angle = where * np.pi / 4
    turned = np.stack(
        [
            np.cos(angle) * points[:, 0] - np.sin(angle) * points[:, 1],
            np.sin(angle) * points[:, 0] + np.cos(angle) * points[:, 1],
        ],
        axis=1,
    )
    return RawData(turned.astype(np.float32), sick.astype(np.int64), ["healthy", "sick"], groups=where)


# %% [markdown]
# ## Network
#
# A network is a class or a function that returns an `nn.Module`. It gets the shape of a sample and
# the number of outputs. Its other parameters become options.


# %%
class TwoLayers(nn.Module):
    def __init__(self, input_shape, num_classes, width: int = 32):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(input_shape[0], width), nn.ReLU())
        self.head = nn.Linear(width, num_classes)

    def forward(self, x):
        return self.head(self.body(x))


# %% [markdown]
# ## Run
#
# Settings refer to both as `module:name`. `__name__` is this notebook; for a file of your own, write
# `data="my_data:hospitals"`. `partition="by_column"` makes each group a client.

# %%
experiment = raypfl.Experiment(
    data={"name": f"{__name__}:hospitals", "spread": 0.8},
    partition="by_column",
    model={"name": f"{__name__}:TwoLayers", "width": 16},
    method={"name": "ditto", "lam": 0.1},
    rounds=20,
    evaluation={"every": 2, "protocols": ["local"]},
    engine={"backend": "inline"},
)
result = raypfl.run(experiment)
result

# %% [markdown]
# No single model can be good for all hospitals: a healthy patient of one looks like a sick patient of another. Methods
# differ in which part of the model they keep on a client. [Partial
# personalization](../methods.md#partial-personalization) takes the names of your network's modules:

# %%
for method in ["fedavg", "local", {"name": "fedper", "personal": "head"}, {"name": "partial", "personal": "body"}]:
    changed = experiment.replace(method=method)
    row = raypfl.run(changed).summary()[0]
    print(f"{row['model']:8} {row['accuracy']:.3f}  {changed.to_dict()['method']['name']}")

# %% [markdown]
# ## Predict
#
# A trained model is a network like yours. It takes samples as the reader returned them:

# %%
network = raypfl.trained_models(result).personal_model(0)
with torch.no_grad():
    print(network(torch.tensor([[2.0, 0.0], [0.0, 2.0]])).softmax(-1).round(decimals=2))

# %% [markdown]
# More: [data](../data.md) (images, text, tables, several labels, partitions, a million described
# clients) and [networks](../own_network.md).
#
# Next: [compare methods](compare.py).
