# %% [markdown]
# # Move to a cluster
#
# A run on a cluster is the run on your laptop with another address: same description, same code, same bits. This page
# uses Ray with two client processes on one machine. Everything here also holds for more processes and more machines.
#
# ## Debug in one process
#
# Without Ray, everything runs in this process, and a breakpoint stops where you put it.

# %%
import raypfl

described = raypfl.Experiment(method="ditto", rounds=3, cohort={"size": 8}, evaluation={"every": 0})
alone = raypfl.run(described.override(["engine.backend=inline"]))

# %% [markdown]
# ## Two processes
#
# With `engine.backend=ray`, the default, the server and the clients run in separate processes. raypfl
# connects to the cluster at `ray.address` or `$RAY_ADDRESS`. Without them, it starts Ray on this
# machine, as here. Each client process reserves `ray.cpus_per_actor` and `ray.gpus_per_actor`
# (with 0.25, four of them share a GPU). `ray.actors` sets their number; by default, as many start as
# fit.

# %%
spread = raypfl.run(described.override(["ray.actors=2"]))
print(spread.metadata["actors"], "client processes")

# %% [markdown]
# Both runs have the same bits, since draws are keyed by client and round, and sums are taken in a
# fixed order:

# %%
print(alone.weights_hash[:16], spread.weights_hash[:16])
assert alone.weights_hash == spread.weights_hash

# %% [markdown]
# ## What changes on several machines
#
# On a running cluster, only the address changes: `raypfl run FILE ray.address=HEAD:6379`. Or submit
# the experiment as a job, with your own modules, and follow its log: `raypfl submit run FILE`.
#
# - **Code**: every node needs the same Python, Ray and raypfl; a [container](../install.md) has them.
#   Modules of your own that the experiment names are sent along.
# - **Data**: only the machine where the run starts needs the files. Other nodes fetch the prepared
#   data once.
# - **Failures**: if a client process dies, its current group runs again elsewhere. If the server may
#   move to another node, put checkpoints where all nodes can reach them:
#   `checkpoint.location=s3://bucket/folder`. `raypfl resume` continues from there.
#
# [On a Ray cluster](../cluster.md) says what each setting does, [jobs](../jobs.md) how to submit
# runs, and [launchers](../../cluster/README.md) how to start a cluster on your own machines, on AWS,
# Kubernetes or Slurm.
#
# Next: [a model for a new client](new_client.py).
