"""A study's file from a list of methods, data and seeds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raypfl.common.errors import ConfigError
from raypfl.common.files import write
from raypfl.experiment.assignments import assign, parse_assignments
from raypfl.experiment.yaml_text import write as as_yaml
from raypfl.studies.cells import plan
from raypfl.studies.description import load

SEEDS = 6
"""With fewer, no two-sided Wilcoxon test over seeds can give p < 0.05."""

_METRICS = {
    "own data": {"protocol": "local", "model": "deployed"},
    "global model": {"protocol": "global", "model": "global"},
}

_COLUMNS = """\
# To compare on several data sets or settings, uncomment these lines and write yours: a group of columns each.
# across:
#   IID: {experiment: {partition: {name: iid}}}
#   Dir(0.1): {experiment: {partition: {name: dirichlet, alpha: 0.1}}}
"""


def scaffold(file: Path, assignments: Sequence[str]) -> int:
    """Write a study to a new file; return the number of its cells.

    Parameters
    ----------
    assignments : ``methods=[fedavg,ditto]``, perhaps ``seeds=N``, and settings that all cells share.

    Raises
    ------
    ConfigError : if the file exists or is no YAML file, no method is named, or a setting is wrong.
    """
    if file.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"A study's file ends in .yaml, but this one is called {file.name!r}.")
    if file.exists():
        raise ConfigError(f"{file} exists; choose another name, or edit the file.")

    values: dict[str, Any] = {}
    for path, value in parse_assignments(assignments):
        assign(values, path, value)
    methods = values.pop("methods", None)
    search = values.pop("search", None)
    if not isinstance(methods, list) or not methods:
        raise ConfigError("A new study needs its methods, as in: raypfl study new mine.yaml methods=[fedavg,ditto]")

    if isinstance(search, dict) and "shared" not in search:
        raise ConfigError(
            "A new study with a search needs the spaces that all methods share, as in: "
            "'search.shared={training.lr: {loguniform: [0.001, 1]}}'"
        )

    labels = [_label(method) for method in methods]
    if len(set(labels)) < len(labels):
        labels = [_label(method, with_module=True) for method in methods]
    for label in labels:
        if labels.count(label) > 1:
            raise ConfigError(f"methods has {label} twice, and each is a row of the table; keep one of them.")

    study = {
        "seeds": values.pop("seeds", SEEDS),
        "experiment": values,
        "methods": dict(zip(labels, methods, strict=True)),
        "metrics": _METRICS,
    }
    if search is not None:
        study["search"] = search
    write(file, f"# {', '.join(labels)}.\n{as_yaml(study)}{_COLUMNS}")
    try:
        described, _ = load(str(file))
        return len(plan(described))
    except ConfigError:
        file.unlink()
        raise


def _label(method: Any, with_module: bool = False) -> str:
    """Return a method's label: its name, that of a class perhaps with its module, and the options that are set."""
    options = method if isinstance(method, dict) else {"name": method}
    name = str(options.get("name", ""))
    if not with_module:
        name = name.rpartition(":")[2]
    return " ".join([name, *(f"{option}={value}" for option, value in options.items() if option != "name")])
