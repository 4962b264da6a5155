"""A run's final models in MLflow: the global one as a logged model, the personal ones as a checkpoint."""

from __future__ import annotations

import contextlib
import logging
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TextIO, cast

import numpy as np
import torch

from raypfl.integrations.tracking.connection import first_line
from raypfl.runs.records import newest
from raypfl.storage.tree import flatten
from raypfl.trained.models import TrainedModels

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from raypfl.trained.trained_model import TrainedModel

GLOBAL = "global_model"
"""The name of the logged model."""

FOLDER = "models"
"""The folder with the personal models, among a run's artifacts."""


def log_models(client: MlflowClient, run_id: str, run_dir: str, warn: Callable[[str], None]) -> None:
    """Copy the models of a finished run to MLflow, if they are not larger than ``tracking.models_mb``.

    Parameters
    ----------
    warn : a function that is called with a sentence for what is not copied; nothing is raised.
    """
    how_to_load = f'raypfl.trained_models("{run_dir}") reads'

    def attempt(what: str, log: Callable[[], None], size: float = 0.0, limit: float = 1.0) -> None:
        if size > limit * 1e6:
            warn(
                f"{what} take {size / 1e6:,.0f} MB, more than tracking.models_mb={limit:g}, and are not copied to "
                f"MLflow; {how_to_load} them from the run's folder."
            )
            return
        try:
            log()
        except Exception as error:  # a user's own network may raise anything
            reason = first_line(error)
            if "data-dependent" in reason:
                reason = "The network's code depends on its inputs' values, so torch.export cannot save it."
            warn(f"{what} are not in MLflow: {reason} {how_to_load} them.")

    def log_all() -> None:
        experiment, snapshot = newest(run_dir, whole=False)
        models = TrainedModels.of_snapshot(experiment, snapshot)
        limit = experiment.tracking.models_mb

        theta = experiment.global_model(models.server)
        if theta is not None:
            log_global = partial(_log_global_model, client, run_id, models)
            attempt("The parameters of the run's global model", log_global, theta.nbytes, limit)
        if experiment.method.has("personal_model"):
            log_personal = partial(_log_personal_models, client, run_id, models)
            # The method may need the server's state to make them, such as a hypernetwork.
            server_bytes = sum(tensor.nbytes for tensor in flatten(snapshot.server)[1].values())
            size = snapshot.states_bytes + server_bytes
            attempt("The parameters of the run's personal models", log_personal, size, limit)

    attempt("The run's models", log_all)


def _log_personal_models(client: MlflowClient, run_id: str, models: TrainedModels) -> None:
    with tempfile.TemporaryDirectory() as folder:
        models.export(folder)
        client.log_artifacts(run_id, folder, FOLDER)


def _log_global_model(client: MlflowClient, run_id: str, models: TrainedModels) -> None:
    # Not mlflow.pytorch.log_model, which records in the process's active run.
    from mlflow.entities import LoggedModelOutput
    from mlflow.models import Model

    run = client.get_run(run_id)
    if run.outputs and any(output.step == models.round for output in run.outputs.model_outputs):
        return  # recorded before, as by `raypfl track`

    tags = {"method": run.data.tags["method"], "data": run.data.tags["data"]}
    logged = client.create_logged_model(run.info.experiment_id, GLOBAL, source_run_id=run_id, tags=tags)
    description = Model(artifact_path=logged.artifact_location, model_uuid=logged.model_id, run_id=run_id)

    status: Literal["READY", "FAILED"] = "FAILED"
    try:
        with tempfile.TemporaryDirectory() as folder:
            # Two samples: an example of one sample would fix the batch size at one.
            client_with_most = int(models.outline.sizes("train").argmax())
            indices = np.resize(models.outline.data.indices(client_with_most), 2)
            examples, _ = models.outline.take(indices)
            _save(models.global_model(), examples, f"{folder}/model", description)
            client.log_model_artifacts(logged.model_id, f"{folder}/model")
        status = "READY"
    finally:
        client.finalize_logged_model(logged.model_id, status)

    client.log_outputs(run_id, [LoggedModelOutput(logged.model_id, models.round)])


def _save(model: TrainedModel, inputs: np.ndarray, path: str, description: Any) -> None:
    """Save a model with example inputs, a signature and its requirements, which MLflow would need a minute to infer."""
    import mlflow.pytorch
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    with torch.no_grad():
        outputs = model(torch.from_numpy(inputs)).numpy()

    def schema(array: np.ndarray) -> Schema:
        return Schema([TensorSpec(array.dtype, (-1, *array.shape[1:]))])

    requirements = [f"torch=={torch.__version__.partition('+')[0]}", f"numpy=={np.__version__}"]
    with _without_reports_of_torch():
        mlflow.pytorch.save_model(
            model,
            path,
            mlflow_model=description,
            signature=ModelSignature(schema(inputs), schema(outputs)),
            input_example=inputs,
            pip_requirements=requirements,
            serialization_format="pt2",
        )


class _OfOtherThreads:
    """Standard error without what the thread writes that made this object."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._thread = threading.get_ident()

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self._thread else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def _without_reports_of_torch() -> Iterator[None]:
    """Do not show the graph that torch prints of a network that it cannot export; its error is told as a warning."""
    logger = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    was_disabled = logger.disabled
    stderr = cast(TextIO, _OfOtherThreads(sys.stderr))
    with warnings.catch_warnings(action="ignore"), contextlib.redirect_stderr(stderr):
        logger.disabled = True
        try:
            yield
        finally:
            logger.disabled = was_disabled
