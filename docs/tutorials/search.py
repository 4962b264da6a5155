# %% [markdown]
# # Search for hyperparameters
#
# How strongly should Ditto pull a personal model toward the global one, and which learning rate is best? A sweep
# describes the experiment, the settings to search, and their spaces. Ray Tune draws configurations, and its ASHA stops
# trials that fall behind.

# %%
import pandas as pd

import raypfl

outcome = raypfl.tune(
    {
        "name": "ditto",
        "experiment": {
            "method": "ditto",
            "rounds": 6,
            "data": {"name": "digits", "val_fraction": 0.2},
            "evaluation": {"every": 2},
        },
        "search": {"method.lam": {"loguniform": [0.01, 10]}, "training.lr": {"loguniform": [0.01, 0.5]}},
        "trials": 4,
        "scheduler": {"name": "asha", "grace": 2},
    }
)
pd.DataFrame(outcome.rows())

# %% [markdown]
# Configurations are compared on validation data, which each client holds out of its training samples.
# Test data is refused: if it were used to choose a configuration, it would no longer show how good a
# model is on new data.
#
# The best configuration is an experiment. So far, its test accuracy has not been used:

# %%
best = raypfl.Experiment.from_yaml(outcome.folder / "best.yaml")
result = raypfl.run(best.override(["engine.backend=inline", "rounds=20"]))
result

# %% [markdown]
# The folder of the sweep also has a table of the trials, and pictures:

# %%
print([file.name for file in outcome.files])

# %% [markdown]
# On the command line: `raypfl tune FILE`, with the same description in YAML. Run it again after an
# interruption, and it continues. [Hyperparameter search](../tune.md) has all spaces, searchers and
# schedulers.
#
# Next: [move to a cluster](move_to_a_cluster.py).
