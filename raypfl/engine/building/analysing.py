"""The analyses of a run, on the server: observations go to files, logged values to the round's log."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from torch import Tensor

from raypfl.analysis import AnalysedRound, Observation
from raypfl.analysis.base import AnalysedRun, analysis_folder, save_observations
from raypfl.common.errors import MethodError, RaypflError
from raypfl.common.user_code import where_defined, with_location
from raypfl.engine.prepared import Prepared
from raypfl.experiment import Experiment
from raypfl.federation.cohort import Cohort, round_record
from raypfl.federation.logged import EarlierKinds, Logged


class Analyses:
    """All analyses of a run."""

    def __init__(self, prepared: Prepared, run_dir: str):
        experiment = prepared.experiment
        self._analyses = experiment.analyses
        self._folders = [analysis_folder(run_dir, analysis) for analysis in self._analyses]
        self._run = AnalysedRun(
            task=prepared.task,
            method=experiment.method,
            training=experiment.training,
            cohort_size=prepared.cohort_size,
            departures=_departures(experiment),
            samples=prepared.training_samples,
            pools=prepared.server_pools,
        )

    def global_model(self, state: dict[str, Any]) -> Tensor | None:
        """Return a copy of the global model at a state of the server; None without a model, or without analyses."""
        if not self._analyses:
            return None
        model = self._run.method.global_model(state)
        return None if model is None else model.clone()

    def observers(self, round: int) -> tuple[int, ...]:
        """Return the numbers of the analyses that see the local steps of a round."""
        rounds = self._run.task.rounds
        return tuple(i for i, analysis in enumerate(self._analyses) if analysis.observes(round, rounds))

    def keep(self, round: int, observed: Mapping[int, list[Observation]]) -> None:
        """Write what the analyses observed of a group's local steps, a file for each client."""
        for number, observations in observed.items():
            for _, client_observations in groupby(observations, lambda observation: observation.client):
                save_observations(self._folders[number], round, list(client_observations))

    def start(self, state: dict[str, Any]) -> Logged:
        """Analyse the initial model, before the first round; return what the analyses log."""
        initial = self.global_model(state)
        logged = Logged()
        self._call("start", 0, (), (initial, initial), logged, {})
        return logged

    def after_round(self, cohort: Cohort, models: tuple[Any, Any], earlier_kinds: EarlierKinds) -> None:
        """Analyse a round, given the global model before it and after it; what is logged joins the round's log."""
        if not self._analyses:
            return
        present = tuple(client for client, is_in in zip(cohort.ids, cohort.present, strict=True) if is_in)
        _, logged = round_record(cohort)
        self._call("after_round", cohort.round, present, models, logged, earlier_kinds)

    def _call(
        self,
        hook: str,
        round: int,
        clients: tuple[int, ...],
        models: tuple[Any, Any],
        logged: Logged,
        earlier_kinds: EarlierKinds,
    ) -> None:
        """Call a hook of each analysis that is due, with its own copies of the models."""
        for analysis, folder in zip(self._analyses, self._folders, strict=True):
            if round and not analysis.is_due(round, self._run.task.rounds):
                continue

            folder.mkdir(parents=True, exist_ok=True)
            before, after = (None if model is None else model.clone() for model in models)
            view = AnalysedRound(round, clients, (before, after), self._run, Path(folder), earlier_kinds)
            function = getattr(analysis, hook)
            try:
                function(view)
            except RaypflError:
                raise
            except Exception as error:
                when = f"after round {round}" if round else "before the first round"
                raise MethodError(
                    f"{where_defined(function)} failed {when}: {type(error).__name__}: {with_location(error)}"
                ) from error

            # The fields of Logged, all dicts: numbers, tables and images.
            for added, total in zip(vars(view.logged).values(), vars(logged).values(), strict=True):
                total.update(added)


def _departures(experiment: Experiment) -> tuple[str, ...]:
    """Return the settings in force by which clients do, or the server gets, something else than the method says."""
    in_force = {
        "attack": experiment.attack is not None,
        "aggregation": experiment.aggregation is not None,
        "compression": experiment.compression is not None,
        "privacy.noise": experiment.privacy.noise is not None,
        "asynchronous.buffer": experiment.asynchronous.buffer is not None,
        "devices.partial_work": experiment.devices.partial_work > 0,
        "cohort.late": experiment.cohort.late == "partial",
        "data.augmentation": bool(experiment.data.augmentation),
    }
    return tuple(setting for setting, is_in_force in in_force.items() if is_in_force)
