"""A run's final models in MLflow: the global one as a model of its own, the personal ones as one file."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from raypfl.common.errors import CheckpointError
from raypfl.runs import models_file
from raypfl.runs.result import RECIPE
from raypfl.runs.trained import TrainedModels, makes_personal_models, newest
from raypfl.tracking import entries
from raypfl.tracking.run import quiet_mlflow, tracking_uri

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from raypfl.models.trained_model import TrainedModel
    from raypfl.server.outline import DataOutline
    from raypfl.storage.checkpoint import Snapshot

GLOBAL = "global_model"
FILE = "models.safetensors"


def trained_models(run: str | Path, uri: str | None = None) -> TrainedModels:
    """The models that a run ended with, as networks that take images as they are stored.

    Parameters
    ----------
    run : the run's folder, or the id of its MLflow run, for whose models neither the folder nor, unless the method
        fine-tunes them, the data are needed.
    uri : MLflow's tracking URI; None: $MLFLOW_TRACKING_URI or, without that, that of runs in the folder ``runs``.

    Raises
    ------
    CheckpointError : if there is no such run, or it has no models.

    Examples
    --------
    ``raypfl.trained_models(result.run_dir).personal_model(17)(images)`` gives client 17's logits.
    """
    if (Path(run) / RECIPE).exists():
        return TrainedModels.of_run(run)
    from raypfl.config import Experiment

    uri = uri or tracking_uri(Experiment())
    client = quiet_mlflow().MlflowClient(uri)
    try:
        return TrainedModels.of_file(client.download_artifacts(str(run), FILE))
    except CheckpointError:
        raise
    except Exception as error:  # whatever a tracking server, a database or a network may come up with
        raise CheckpointError(
            f"{run} is neither a run's folder, nor has MLflow at {entries.without_password(uri)} the personal models "
            f"of a run of that id: {entries.first_line(error)}"
        ) from error


def log_models(client: MlflowClient, run_id: str, run_dir: str, warn: Callable[[str], None]) -> None:
    """Put the models of a finished run into MLflow, those that are not larger than the run's settings allow.

    `warn` : is told in a sentence what is not put there; that raises nothing.
    """

    def told(what: str, log: Callable[[], None]) -> None:
        try:
            log()
        except Exception as error:  # a network of a person's own may do anything
            warn(f'{what} not in MLflow: {entries.first_line(error)} raypfl.trained_models("{run_dir}") reads them.')

    def log() -> None:
        experiment, snapshot = newest(run_dir, whole=False)
        models, limit = TrainedModels.of_snapshot(experiment, snapshot), experiment.tracking.models_mb
        theta = experiment.method.global_model(models.server)
        if theta is not None and _fits("The global model takes", theta.nbytes, limit, run_dir, warn):
            told("The run's global model is", lambda: _log_global_model(client, run_id, models))
        kept = "What the personal models are made of takes"
        if makes_personal_models(experiment.method) and _fits(kept, snapshot.states_bytes, limit, run_dir, warn):
            told("The run's personal models are", lambda: _log_personal_models(client, run_id, models, snapshot))

    told("The run's models are", log)


def _log_personal_models(client: MlflowClient, run_id: str, models: TrainedModels, snapshot: Snapshot) -> None:
    with tempfile.TemporaryDirectory() as folder:
        models_file.write(Path(folder, FILE), models.experiment, snapshot, models.outline)
        client.log_artifact(run_id, f"{folder}/{FILE}")


def _fits(what: str, size: int, limit: float, run_dir: str, warn: Callable[[str], None]) -> bool:
    if size <= limit * 1e6:
        return True
    warn(
        f"{what} {size / 1e6:,.0f} MB, more than tracking.models_mb={limit:g}, and is not copied to MLflow; "
        f'raypfl.trained_models("{run_dir}") reads it from the run\'s folder.'
    )
    return False


def _log_global_model(client: MlflowClient, run_id: str, models: TrainedModels) -> None:
    # By the client's functions, since mlflow.pytorch.log_model records wherever the whole process records.
    from mlflow.entities import LoggedModelOutput
    from mlflow.models import Model

    run = client.get_run(run_id)
    tags = {"method": run.data.tags["method"], "data": run.data.tags["data"]}
    logged = client.create_logged_model(run.info.experiment_id, GLOBAL, source_run_id=run_id, tags=tags)
    about = Model(artifact_path=logged.artifact_location, model_uuid=logged.model_id, run_id=run_id)
    status: Literal["READY", "FAILED"] = "FAILED"
    try:
        with tempfile.TemporaryDirectory() as folder:
            _save(models.global_model(), _examples(models.outline), f"{folder}/model", about)
            client.log_model_artifacts(logged.model_id, f"{folder}/model")
        status = "READY"
    finally:
        client.finalize_logged_model(logged.model_id, status)
    client.log_outputs(run_id, [LoggedModelOutput(logged.model_id, models.round)])


def _save(model: TrainedModel, images: np.ndarray, path: str, about: Any) -> None:
    """With an example of its input and, from that, its signature; the requirements, if inferred, take a minute."""
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


def _examples(outline: DataOutline) -> np.ndarray:
    """Two training images of a client: torch takes the number of images in an example for fixed if that is one."""
    client = int(outline.sizes("train").argmax())
    images, _ = outline.take(np.resize(outline.data.indices(client), 2))
    return images
