"""A run on digits that several benchmarks vary: 100 clients, a network of 9,610 parameters, in this process."""

from __future__ import annotations

from typing import Any

import raypfl


def experiment(folder: str, cohort: int, steps: int, **parts: Any) -> raypfl.Experiment:
    """Describe a run that takes `steps` local steps of ten samples; `parts` are further sections of its description."""
    common: dict[str, Any] = {
        "data": {"name": "digits", "cache": f"{folder}/cache"},
        "partition": {"name": "iid", "clients": 100},
        "cohort": {"size": cohort},
        "model": {"name": "mlp", "hidden": [128]},
        "training": {"lr": 0.01, "batch_size": 10, "steps": steps},
        "engine": {"backend": "inline"},
        "tracking": {"mlflow": False},
        "output": f"{folder}/runs",
    }
    return raypfl.Experiment(**(common | parts))
