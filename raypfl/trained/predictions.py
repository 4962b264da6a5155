"""Predictions for the rows of a table, by the models of a run."""

from __future__ import annotations

import csv
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from raypfl.common.errors import ConfigError, DataError
from raypfl.common.files import draft
from raypfl.common.threads import threads
from raypfl.data.client_names import number_of
from raypfl.data.datasets.readers.tabular.table import Table
from raypfl.data.datasets.source import files_under
from raypfl.data.datasets.tables import is_test_file
from raypfl.learning.objectives import Classification
from raypfl.trained.models import TrainedModels
from raypfl.trained.new_rows import NewRows, inputs_of_rows
from raypfl.trained.saved_model import Origin, inputs_of, load_with_origin
from raypfl.trained.trained_model import TrainedModel

PREDICTED = "predicted"
"""The name of the column of predictions."""

_ROWS_AT_A_TIME = 4096


@dataclass(frozen=True)
class Predictions:
    """The rows of a table, with what a run's models predict for them.

    Attributes
    ----------
    table : the rows as they were given, and the columns ``predicted`` and, where the target is a class,
        ``probability_NAME`` for each class.
    target : the name of the target.
    clients : numbers of the clients whose personal models were used; None: one model was, the global one or a file's.
    tested : the number of rows that have the target.
    metrics : ``accuracy``, or ``mse`` and ``mae``, of the predictions for these; empty if there are none.
    """

    table: pa.Table = field(repr=False)
    target: str
    clients: list[int] | None
    tested: int
    metrics: dict[str, float]
    _rows: NewRows = field(repr=False)

    @property
    def columns(self) -> list[str]:
        """The names of the columns that are not in the rows."""
        return self.table.column_names[self._rows.table.num_columns :]

    def save(self, file: str | Path) -> Path:
        """Write the table as CSV or Parquet, by the file's ending; rows of a CSV file stay as they are written there.

        Raises
        ------
        ConfigError : if it ends otherwise.
        Unwritable : if it cannot be written.
        """
        path = refuse_other_endings(Path(file))
        with draft(path) as unfinished:
            if path.suffix == ".parquet":
                pq.write_table(self.table, unfinished)
            else:
                self._write_csv(unfinished)
        return path

    def _write_csv(self, path: Path) -> None:
        rows = self._rows.table if self._rows.texts is None else self._rows.texts
        columns = [column.to_pylist() for column in rows.columns]
        for name in self.columns:
            # The shortest text that gives the same float32: 0.1, not 0.10000000149.
            columns.append(self.table[name].to_numpy().astype(str).tolist())
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(self.table.column_names)
            writer.writerows(zip(*columns, strict=True))


def predict(
    run: str | PathLike[str] | TrainedModels, rows: Any, *, client: int | str | None = None, use_global: bool = False
) -> Predictions:
    """Predict the target of rows of a table by the models of a run that was trained on a table (``data=table``).

    Without `client` and `use_global`, the personal model of the client that a row is from predicts it: the one that its
    value in the column ``data.group`` names. If the method makes no personal models, the global model predicts all.

    Parameters
    ----------
    run : the run's folder, its result, or its :func:`raypfl.trained_models`; or the file of a model that was made for a
        new client, which predicts all rows.
    rows : a CSV or Parquet file, or a table of PyArrow, pandas or Polars, with the columns of the run's table. The
        target may be missing, and other columns have no effect.
    client : the name or number of a client, whose personal model predicts all rows.
    use_global : whether the global model predicts all rows.

    Raises
    ------
    ConfigError : if the run has no such model, or was not trained on a table of classes or numbers.
    DataError : if the rows do not fit the run, with the row and the column.

    Examples
    --------
    ``raypfl.predict(result, "new.csv").table.to_pandas()`` is a data frame with the column ``predicted``.
    """
    if client is not None and use_global:
        raise ConfigError("Both a client and the global model are given; keep one of them.")
    if not isinstance(run, TrainedModels):
        run = Path(run)
    if isinstance(run, Path) and run.is_file():
        if client is not None or use_global:
            raise ConfigError(f"{run} is one model, which predicts all rows; leave --client and --global out.")
        model, origin = load_with_origin(run)
        reader = _table_reader(origin, "raypfl.load_model(FILE)")
        return _predictions(origin, reader, NewRows.read(rows), None, partial(_outputs_of, model))

    models = run if isinstance(run, TrainedModels) else TrainedModels.of_run(run)
    reader = _table_reader(models.origin, "raypfl.trained_models(RUN).global_model()")
    new_rows = NewRows.read(rows)
    clients = None if use_global else _clients(models, new_rows, client, reader.group)
    return _predictions(models.origin, reader, new_rows, clients, partial(_outputs, models, clients))


def _predictions(
    origin: Origin,
    reader: Table,
    rows: NewRows,
    clients: np.ndarray | None,
    outputs_of: Callable[[Tensor], Tensor],
) -> Predictions:
    """Return the predictions for rows by their clients' models or by one, whose outputs a function returns."""
    config = origin.experiment.data
    target = str(reader.target)
    inputs = torch.from_numpy(inputs_of_rows(rows, config, origin.outline))
    with threads(origin.experiment.engine.threads):
        columns = _columns(origin, outputs_of(inputs))

    table = rows.table
    for name, values in columns.items():
        if name in table.column_names:
            raise DataError(f"{rows.name} has a column {name!r}, as the predictions would; rename it.")
        table = table.append_column(name, pa.array(values))

    errors = _errors(origin.outline.kind, rows, target, columns[PREDICTED])
    metrics = {}
    if len(errors) and origin.outline.kind == "numbers":
        metrics = {"mse": float((errors**2).mean()), "mae": float(abs(errors).mean())}
    elif len(errors):
        metrics = {"accuracy": 1 - float(errors.mean())}
    if metrics:
        _warn_of_trained_rows(rows, Path(config.root or "").expanduser())
    used = None if clients is None else np.unique(clients).tolist()
    return Predictions(table, target, used, len(errors), metrics, rows)


def _warn_of_trained_rows(rows: NewRows, root: Path) -> None:
    """Warn if rows are from a file of the run's table, unless its name says that they are for tests."""
    for path in files_under(root):
        # A file on its own is no test split, whatever its name.
        is_for_tests = path != root and is_test_file(str(path.relative_to(root)))
        if rows.file is not None and path.samefile(rows.file) and not is_for_tests:
            warnings.warn(
                f"The run trained on rows of {rows.name}, so its models do better on them than on new ones. Results on "
                "the rows that it left for tests are in its evaluations.",
                stacklevel=4,
            )


def refuse_other_endings(path: Path) -> Path:
    """Return a file for predictions; raises a ConfigError unless it ends in .csv or .parquet."""
    if path.suffix not in (".csv", ".parquet"):
        raise ConfigError(f"{path} names the file of the predictions, so it must end in .csv or .parquet.")
    return path


def _table_reader(origin: Origin, model_in_python: str) -> Table:
    """Return the reader of the run's table; without one, advise to call the model in Python."""
    config = origin.experiment.data
    reader = config.reader
    if not isinstance(reader, Table):
        raise ConfigError(
            f"The run was trained on {config.name!r}, and predictions are for rows of tables (data=table and "
            f"data=text_table). Its models take arrays {inputs_of(origin.outline)}, in Python: {model_in_python}(x)."
        )
    return reader


def _clients(models: TrainedModels, rows: NewRows, client: int | str | None, group: str | None) -> np.ndarray | None:
    """Return the number of the client whose model predicts each row, ``int64[n]``; None: the global model does."""
    names = models.client_names
    if client is not None:
        return np.full(rows.table.num_rows, number_of(client, names, models.num_clients))
    if not models.experiment.method.has("personal_model"):
        return None

    choose = "name one client, whose personal model predicts all rows (--client), or the global model (--global)"
    if group is None or names is None:
        raise ConfigError(f"The run has a personal model for each of {models.num_clients} clients: {choose}.")
    if group not in rows.table.column_names:
        raise DataError(f"{rows.name} has no column {group!r}, which names the client of a row: add it; or {choose}.")
    return rows.clients(group, names)


def _outputs(models: TrainedModels, clients: np.ndarray | None, inputs: Tensor) -> Tensor:
    """Return the outputs for all rows, ``[n, outputs]``, by the clients' models or, without clients, the global one."""
    if clients is None:
        return _outputs_of(models.global_model(), inputs)

    order = np.argsort(clients, kind="stable")
    numbers, starts = np.unique(clients[order], return_index=True)
    outputs = []
    for number, rows in zip(numbers.tolist(), np.split(order, starts[1:]), strict=True):
        outputs.append(_outputs_of(models.personal_model(number), inputs[rows]))
    return torch.cat(outputs)[np.argsort(order)]


def _outputs_of(model: TrainedModel, inputs: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(block) for block in inputs.split(_ROWS_AT_A_TIME)])


def _columns(origin: Origin, outputs: Tensor) -> dict[str, np.ndarray]:
    """Return the columns of predictions, by name."""
    mismatch = origin.measures.output_mismatch(outputs)
    if mismatch:
        raise DataError(f"The network {mismatch}")
    if origin.outline.kind == "numbers":
        return {PREDICTED: outputs[:, 0].float().numpy()}

    names = origin.outline.class_names
    values = [int(name) for name in names] if all(re.fullmatch(r"0|-?[1-9]\d*", name) for name in names) else names
    columns = {PREDICTED: np.array(values)[outputs.argmax(1).numpy()]}
    if isinstance(origin.measures.objective, Classification):
        for name, probabilities in zip(names, outputs.float().softmax(1).unbind(1), strict=True):
            columns[f"probability_{name}"] = probabilities.numpy()
    return columns


def _errors(kind: str, rows: NewRows, target: str, predicted: np.ndarray) -> np.ndarray:
    """Return, for rows that have the target, prediction minus target or, of classes, whether it is wrong."""
    if target not in rows.table.column_names:
        return np.zeros(0)
    if kind == "numbers":
        errors = predicted - rows.numbers(target)
        return errors[~np.isnan(errors)]

    pairs = zip(predicted.astype(str).tolist(), rows.spellings(target), strict=True)
    return np.array([name not in spellings for name, spellings in pairs if spellings])
