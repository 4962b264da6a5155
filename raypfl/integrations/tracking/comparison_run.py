"""The MLflow run that is the parent of a comparison's runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypfl.integrations.tracking.entries import short_name
from raypfl.integrations.tracking.run_ids import existing_run, keep_run_id

if TYPE_CHECKING:
    from mlflow import MlflowClient

PARENT = "mlflow.parentRunId"
"""The tag by which MLflow puts a run below another."""


class ComparisonRun:
    """The parent of the runs of a comparison, which is created with the first of them.

    Attributes
    ----------
    name : the name of the comparison.
    about : what its runs are, for the name of the parent; empty: that has the scores of the methods.
    run_id : the id of the parent; empty until there is one.

    Parameters
    ----------
    folder : a folder that keeps the parent's id, so that an interrupted comparison continues below it. A new
        folder gets the parent of the first run that was recorded before.
    """

    def __init__(self, name: str, tags: Mapping[str, str], folder: Path | None = None, about: str = ""):
        self.name = name
        self.about = about
        self.run_id = ""
        self._tags = tags
        self._folder = folder

    def parent_tags(self, client: MlflowClient, experiment_id: str, start_time: int, dataset: Any) -> dict[str, str]:
        """Return tags that put a run below the parent, which is in the MLflow experiment of the first run.

        Parameters
        ----------
        start_time : the start of the run, in milliseconds.
        dataset : the run's data, as MLflow records them.
        """
        self.run_id = self.run_id or self._reopen(client, experiment_id)
        if not self.run_id:
            self.run_id = self._create(client, experiment_id, start_time)
            client.log_inputs(self.run_id, datasets=[dataset])
        return {PARENT: self.run_id, "comparison": self.name}

    def adopt_parent(self, client: MlflowClient, tags: Mapping[str, str]) -> None:
        """Continue below the parent of a run with these tags, if it has this name and the folder has no other."""
        is_of_comparison = PARENT in tags and tags.get("comparison") == self.name
        if is_of_comparison and self._folder and existing_run(client, self._folder) is None:
            self._keep_id(client, self._folder, tags[PARENT])

    def _reopen(self, client: MlflowClient, experiment_id: str) -> str:
        """Set the parent in the folder to running, and return its id; empty if there is none."""
        run = existing_run(client, self._folder) if self._folder else None
        if run is None or run.info.experiment_id != experiment_id:
            return ""
        client.update_run(run.info.run_id, status="RUNNING")
        return str(run.info.run_id)

    def _create(self, client: MlflowClient, experiment_id: str, start_time: int) -> str:
        tags = {**context_tags(), **self._tags, "kind": "comparison", "comparison": self.name}
        run_name = short_name(f"{self.name}: {self.about}" if self.about else self.name)
        run_id: str = client.create_run(experiment_id, start_time, tags, run_name).info.run_id
        if self._folder:
            self._keep_id(client, self._folder, run_id)
        return run_id

    @staticmethod
    def _keep_id(client: MlflowClient, folder: Path, run_id: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        keep_run_id(client, folder, run_id)


def context_tags() -> dict[str, str]:
    """Return MLflow's own tags: user, program, git commit."""
    from mlflow.tracking.context.registry import resolve_tags

    return resolve_tags()
