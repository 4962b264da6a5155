"""Neural tangent kernels of the models in the checkpoints of a finished run."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch

from raypfl.analysis.ntk import NTK, nonlinear
from raypfl.analysis.theory.kernels import Spectrum
from raypfl.common.errors import ConfigError
from raypfl.common.threads import threads
from raypfl.engine.prepared import Prepared
from raypfl.runs.result import RunResult


def checkpoint_kernels(result: RunResult, analysis: NTK) -> list[dict[str, float]]:
    """Return numbers of the global model's kernel after each round that has a checkpoint.

    Parameters
    ----------
    analysis : the analysis whose settings for samples, outputs and sketch are used.

    Returns
    -------
    A dict for each checkpoint, the oldest first: ``round``, the numbers of :meth:`NTK.numbers`, and from the second on
    the changes since the one before, of the kernel (``drift``) and of the outputs (``nonlinear``).

    Raises
    ------
    ConfigError : if there is no checkpoint, or the method has no global model.
    """
    experiment = result.experiment
    checkpoints = [(round, experiment.global_model(server)) for round, server in result.server_states()]
    if not checkpoints:
        raise ConfigError(
            f"The run in {result.run_dir} was not analysed, and none of its checkpoints is left. Run it again with "
            "'analyses=[ntk]', or with 'analyses=[flntk]' if the network is two_layer."
        )
    models = [(round, theta) for round, theta in checkpoints if theta is not None]
    if not models:
        raise ConfigError(
            f"{type(experiment.method).__name__} has no global model whose kernel could be computed from checkpoints. "
            "Run it again with 'analyses=[ntk]', which observes the clients' models."
        )

    data = experiment.load_data()
    prepared = Prepared(experiment, data)
    model = prepared.model
    each = analysis.samples_per_client(data.num_clients)
    parts = [prepared.training_samples(client).x[:each] for client in range(data.num_clients)]
    x = torch.cat(parts)
    sizes = [len(part) for part in parts]

    with threads(experiment.engine.threads), model.mode(train=False):
        kernels = [analysis.of_model(model, theta, x) for _, theta in models]
        rows_per_sample = len(kernels[0]) // len(x)  # one for each output
        owner = np.repeat(np.arange(len(sizes)), np.multiply(sizes, rows_per_sample))

        rows: list[dict[str, float]] = []
        for (round, _), kernel in zip(models, kernels, strict=True):
            rows.append({"round": round, **analysis.numbers(kernel, Spectrum.of(kernel), owner)})
        for i, ((_, before), (_, after)) in enumerate(pairwise(models)):
            rows[i + 1]["drift"] = float((kernels[i + 1] - kernels[i]).norm() / kernels[i].norm())
            rows[i + 1]["nonlinear"] = nonlinear(model, before, after, x)
    return rows
