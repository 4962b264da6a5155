# %% [markdown]
# # Compare methods
#
# A single run says little about which method is better: with another seed, the clients, initial weights and batches are
# different. A comparison therefore runs every method with several seeds. For each seed, all methods get the same
# partition.

# %%
import pandas as pd
from PIL import Image

import raypfl
from raypfl.experiment import experiments
from raypfl.results.drawing import draw

planned = experiments(
    {
        "methods": ["fedavg", "local", {"name": "ditto", "lam": 0.1}],
        "seeds": 2,
        "rounds": 10,
        "partition": {"name": "dirichlet", "clients": 20, "alpha": 0.1},
        "evaluation": {"every": 2},
        "engine": {"backend": "inline"},
    }
)
results = [raypfl.run(experiment) for experiment in planned]

# %% [markdown]
# Two seeds keep this page quick; use five or more for your own comparisons. You can also write the same keys into a
# YAML file for `raypfl run FILE`, or run `raypfl run --method fedavg,local,ditto --seeds 2`. Both print the table, and
# can be continued after an interruption.
#
# ## The numbers
#
# Each client is tested on its own data (`local`) and on everybody's data (`global`), with its
# personal model and with the global model.

# %%
rows = pd.DataFrame(
    {"method": result.experiment.to_dict()["method"]["name"], "seed": result.experiment.seed} | row
    for result in results
    for row in result.summary()
)
by_method = rows.groupby(["method", "protocol", "model"])[["accuracy", "worst_decile"]]
(100 * by_method.agg(["mean", "std"])).round(1)

# %% [markdown]
# The standard deviation here is over seeds; the column `std` of a summary is over clients. These clients differ so much
# that training alone is as good as Ditto on a client's own data. Neither method's personal models know the classes of
# other clients; the global model does. The worst decile shows whether a few clients pay for a good mean.
#
# Methods share their seeds, so differences between them are computed seed by seed and client by
# client:

# %%
raypfl.compare(results, baseline="fedavg")

# %% [markdown]
# ## The picture and the report

# %%
Image.open(draw(results, "comparison.png"))

# %%
raypfl.report.write(results, "report.html")

# %% [markdown]
# The report is one HTML file without scripts: send it, archive it with a paper, or print it.
# `raypfl report runs` writes one for all runs in a folder.
#
# ![A report: the best method in a sentence, the table of results, curves.](../images/report.png)
#
# Read it from top to bottom:
#
# - **The first sentence** names the best method on a client's own data, and in how many seeds it is
#   ahead of the second best. If the interval of the difference includes 0, run more seeds.
# - **Results**: does the best mean also have the best worst decile? Are probabilities calibrated
#   (ECE)?
# - **Learning**: is a curve still rising at the end? Then more rounds may change the order.
# - **Accuracy for effort**: for the same number of megabytes or seconds, the order may be different.
# - **Clients**: who gains from a personal model, and who loses?
# - **Settings**: what was the same for all methods? Methods need their own learning rates to be compared
#   fairly: [search for them](search.py).
