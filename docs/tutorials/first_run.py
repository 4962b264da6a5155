# %% [markdown]
# # A first run
#
# Twenty clients hold handwritten digits, and each has its own mix of classes. [Ditto](../methods.md) trains
# one global model for all of them and a personal model for each. This takes a few seconds, and
# nothing is downloaded: the digits are part of scikit-learn.
#
# Every tutorial is a [Python file](first_run.py) with cells: run it in Jupyter (with Jupytext), in
# VS Code, or as a script.

# %%
import raypfl

experiment = raypfl.Experiment(method={"name": "ditto", "lam": 0.1}, rounds=20, evaluation={"every": 2})
result = raypfl.run(experiment)
result

# %% [markdown]
# The left picture shows the accuracy by round, the right one the final accuracy of each client, from the worst to the
# best. The table has means over clients, tested on their own data (`local`) and on everybody's data (`global`).
#
# ## An experiment is a description
#
# `Experiment` only holds settings. A setting that you leave out has its [default](../settings.md). A wrong name or
# value is refused at once, before anything runs:

# %%
try:
    raypfl.Experiment(training={"batchsize": 20})
except raypfl.RaypflError as error:
    print(error)

# %% [markdown]
# `override` returns a changed copy, and `to_yaml` gives a file that `raypfl run` takes:

# %%
longer = experiment.override(["rounds=60", "training.lr=0.05"])
print(longer.rounds, longer.training.lr, experiment.rounds)
print(*experiment.to_yaml().splitlines()[:8], "...", sep="\n")

# %% [markdown]
# ## The result
#
# Numbers are in [PyArrow](https://arrow.apache.org/docs/python/) tables, which have `to_pandas()`.
# `rounds` has a row for each round; `evaluations` has one for each evaluated round, client, protocol
# and model; `ledger` has one for each message.

# %%
for row in result.summary():
    print(f"{row['protocol']:6} {row['model']:8} {row['accuracy']:.3f} ± {row['std']:.3f}")
print(result.rounds.column_names)
print(result.evaluations.num_rows, "rows:", result.evaluations.column_names)
print(f"{result.megabytes[0]:.1f} MB up, {result.megabytes[1]:.1f} MB down")

# %% [markdown]
# The result also has the trained models, as flat vectors. `raypfl.trained_models` gives them as
# networks that map images to logits.

# %%
print(result.global_model().shape)
print(result.client_state(3)["personal"].shape)

network = raypfl.trained_models(result).personal_model(3)
network

# %% [markdown]
# ## The same bits
#
# A run's hash covers all final weights, the server's and the clients'. It does not depend on
# the number of processes. The first run used Ray's processes; this one runs in the current process:

# %%
alone = raypfl.run(experiment.override(["engine.backend=inline"]))
print(result.weights_hash[:16], alone.weights_hash[:16])
assert alone.weights_hash == result.weights_hash

# %% [markdown]
# The command line does the same: `raypfl run method=ditto method.lam=0.1 rounds=20 evaluation.every=2`. An interrupted
# run continues with `raypfl resume FOLDER`, or `raypfl.resume(folder)`.
#
# Next: [a method of your own](own_method.py).
