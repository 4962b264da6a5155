"""A run's final models in MLflow: the global one as a model of its own, the personal ones as a checkpoint."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from raypfl.integrations.tracking.connection import first_line
from raypfl.runs.result import newest
from raypfl.trained.models import TrainedModels

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from raypfl.models.trained_model import TrainedModel

GLOBAL = "global_model"
FOLDER = "models"


def log_models(client: MlflowClient, run_id: str, run_dir: str, warn: Callable[[str], None]) -> None:
    """Put the models of a finished run into MLflow, if they are not larger than ``tracking.models_mb``.

    `warn` : is called with a sentence for what is not put there; nothing is raised.
    """
    elsewhere = f'raypfl.trained_models("{run_dir}") reads'

    def attempt(what: str, log: Callable[[], None], size: float = 0.0, limit: float = 1.0) -> None:
        if size > limit * 1e6:
            warn(
                f"{what} take {size / 1e6:,.0f} MB, more than tracking.models_mb={limit:g}, and are not copied to "
                f"MLflow; {elsewhere} them from the run's folder."
            )
            return
        try:
            log()
        except Exception as error:  # a user's own network may raise anything
            warn(f"{what} are not in MLflow: {first_line(error)} {elsewhere} them.")

    def log() -> None:
        experiment, snapshot = newest(run_dir, whole=False)
        models, limit = TrainedModels.of_snapshot(experiment, snapshot), experiment.tracking.models_mb
        theta = experiment.method.global_model(models.server)
        if theta is not None:
            shared = partial(_log_global_model, client, run_id, models)
            attempt("The parameters of the run's global model", shared, theta.nbytes, limit)
        if experiment.method.has("personal_model"):
            personal = partial(_log_personal_models, client, run_id, models)
            attempt("The parameters of the run's personal models", personal, snapshot.states_bytes, limit)

    attempt("The run's models", log)


def _log_personal_models(client: MlflowClient, run_id: str, models: TrainedModels) -> None:
    with tempfile.TemporaryDirectory() as folder:
        models.export(folder)
        client.log_artifacts(run_id, folder, FOLDER)


def _log_global_model(client: MlflowClient, run_id: str, models: TrainedModels) -> None:
    # With the client's functions, since mlflow.pytorch.log_model records wherever the whole process records.
    from mlflow.entities import LoggedModelOutput
    from mlflow.models import Model

    run = client.get_run(run_id)
    tags = {"method": run.data.tags["method"], "data": run.data.tags["data"]}
    logged = client.create_logged_model(run.info.experiment_id, GLOBAL, source_run_id=run_id, tags=tags)
    about = Model(artifact_path=logged.artifact_location, model_uuid=logged.model_id, run_id=run_id)
    status: Literal["READY", "FAILED"] = "FAILED"
    try:
        with tempfile.TemporaryDirectory() as folder:
            # Two images of a client: torch takes the number of images in an example for fixed if it is one.
            examples, _ = models.outline.take(
                np.resize(models.outline.data.indices(int(models.outline.sizes("train").argmax())), 2)
            )
            _save(models.global_model(), examples, f"{folder}/model", about)
            client.log_model_artifacts(logged.model_id, f"{folder}/model")
        status = "READY"
    finally:
        client.finalize_logged_model(logged.model_id, status)
    client.log_outputs(run_id, [LoggedModelOutput(logged.model_id, models.round)])


def _save(model: TrainedModel, images: np.ndarray, path: str, about: Any) -> None:
    """Save it with example inputs and a signature; requirements are given, since inferring them takes a minute."""
    import mlflow.pytorch
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    with torch.no_grad():
        logits = model(torch.from_numpy(images)).numpy()
    inputs, outputs = (Schema([TensorSpec(a.dtype, (-1, *a.shape[1:]))]) for a in (images, logits))
    needed = [f"torch=={torch.__version__.partition('+')[0]}", f"numpy=={np.__version__}"]
    with warnings.catch_warnings(action="ignore"):
        mlflow.pytorch.save_model(
            model,
            path,
            mlflow_model=about,
            signature=ModelSignature(inputs, outputs),
            input_example=images,
            pip_requirements=needed,
            serialization_format="pt2",
        )
