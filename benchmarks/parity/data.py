"""The samples: digits, dealt out once, so that runs from any seed train and test on the same ones."""

from __future__ import annotations

from typing import Any

import numpy as np

from raypfl.data import Dirichlet, FederatedData, load_federated
from raypfl.data.datasets import DataConfig, RawData

CLIENTS = 20
ALPHA = 0.3
SOURCE: dict[str, Any] = {"data": {"name": "benchmarks.parity.data:dealt_digits"}, "partition": "by_column"}
"""``data`` and ``partition`` of a raypfl experiment."""


def dealt_digits(config: DataConfig) -> RawData:
    """scikit-learn's digits with their owners as a column, and each owner's test samples as a published test split."""
    partition = Dirichlet(clients=CLIENTS, alpha=ALPHA)
    dealt = load_federated(DataConfig(), partition, seed=0, cache=config.cache)

    owner = np.empty(len(dealt.labels), np.int64)
    is_test = np.zeros(len(dealt.labels), bool)
    for client in range(CLIENTS):
        for split in ("train", "test"):
            owner[dealt.indices(client, split)] = client
        is_test[dealt.indices(client, "test")] = True

    return RawData(
        inputs=np.asarray(dealt.inputs),
        labels=np.asarray(dealt.labels),
        class_names=dealt.class_names,
        scale=dealt.scale,
        test_mask=is_test,
        groups=owner,
    )


def digits() -> FederatedData:
    """The dealt digits, as raypfl's runs open them."""
    from raypfl.experiment import Experiment

    experiment = Experiment(**SOURCE)
    return load_federated(experiment.data, experiment.partition, seed=0)
