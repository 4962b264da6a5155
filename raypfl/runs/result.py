"""What a run leaves behind."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from torch import Tensor

from raypfl.common.errors import ConfigError, Diverged, NoRun, did_you_mean, listed
from raypfl.common.files import draft, make_folder, write
from raypfl.data.client_names import ClientNames, number_of
from raypfl.engine import history
from raypfl.engine.events import RunFinished
from raypfl.engine.job import checkpoints_of
from raypfl.evaluation import summarise
from raypfl.experiment import Experiment
from raypfl.federation.logged import ANALYSIS
from raypfl.methods import METHODS
from raypfl.storage import checkpoints
from raypfl.storage.columns import Columns
from raypfl.storage.tables import read_parquet, to_arrow

# In a run's folder: its tables and the folder of its images, and files.
TABLES = ("rounds", "evaluations", "ledger", "logged")
IMAGES = "images"
DESCRIPTION = "experiment.yaml"
METADATA = "metadata.json"
SUMMARY = "summary.json"
CLIENT_NAMES = "clients.parquet"

COMPARISON = "comparison.yaml"
"""The file in a comparison's folder with its runs, and the command that started it."""

SWEEP = "sweep.yaml"
"""The file in a sweep's folder with its description."""

SEARCH = "search.yaml"
"""The file in a study's folder with the description of its search, if it has one."""

STUDY_CELLS = "cells.parquet"
"""The file in a study's folder that names the folders of its runs, which it shares with other studies."""

TRIALS = "trials.csv"
"""The file in the folder of a sweep, or of a study with a search, with its trials."""

WITHOUT_RESULT = ("diverged", "failed")
"""The statuses of runs that ended before their end: what they reached is compared with nothing."""

_SUMMARY_KEYS = ("status", "round", "weights_hash", "error", "best_round")
"""What ``summary.json`` holds, as in :class:`raypfl.engine.events.RunFinished`."""

_MAX_NAMED = 6
"""The most folders that a sentence names."""


def description(run_dir: str | Path) -> Experiment:
    """Read the experiment that a run's folder describes.

    Raises
    ------
    NoRun : if it is not the folder of a run.
    """
    refuse_missing(Path(run_dir))
    file = Path(run_dir, DESCRIPTION)
    if not file.exists():
        raise NoRun(f"{run_dir} is {_kind_of_folder(Path(run_dir))}")
    return Experiment.from_record(file)


def _kind_of_folder(folder: Path) -> str:
    """Say what a folder without a run is, and how to go on."""
    if (folder / SWEEP).exists():
        return "a sweep, not a run: give the command `raypfl tune ...` of this sweep again to continue it."
    if (folder / STUDY_CELLS).exists():
        return "a study, not a run: give the command `raypfl study ...` of this study again to continue it."
    kind = "a comparison, not a run" if (folder / COMPARISON).exists() else "not the folder of a run"
    return f"{kind}: it has no {DESCRIPTION}. {_where_runs_are(folder)}"


def refuse_missing(folder: Path) -> None:
    """Raise a NoRun that names the nearest run, or where runs are, if there is no such folder."""
    if folder.exists():
        return
    nearby = [file.parent.name for name in (DESCRIPTION, COMPARISON) for file in folder.parent.glob(f"*/{name}")]
    if nearby:
        hint = did_you_mean(folder.name, nearby, str(folder).removesuffix(folder.name))
        raise NoRun(f"There is no folder {folder}; {hint}")
    nearest = next(parent for parent in folder.parents if parent.exists())
    raise NoRun(f"There is no folder {folder}. {_where_runs_are(nearest)}")


def _where_runs_are(folder: Path) -> str:
    """Return a sentence on where runs are: up to two levels below this folder, which is not a run's."""
    descriptions = [*folder.glob(f"*/{DESCRIPTION}"), *folder.glob(f"*/*/{DESCRIPTION}")]
    run_folders = sorted(str(file.parent) for file in descriptions)
    if not run_folders:
        return "Runs are in the folder that `output` names."
    return f"Runs are in {listed(run_folders, _MAX_NAMED)}."


def write_description(folder: Path, experiment: Experiment) -> None:
    """Write the experiment into its folder, which makes it a run's folder that can be resumed."""
    make_folder(folder)
    write(folder / DESCRIPTION, history.header_comments(folder) + experiment.to_yaml())


def discard_unstarted(folder: Path) -> None:
    """Delete the description of a run that has not begun, and its folder if that is then empty."""
    if not (folder / METADATA).exists():
        (folder / DESCRIPTION).unlink()
        with contextlib.suppress(OSError):
            folder.rmdir()


def rounds_saved(run_dir: str | Path, experiment: Experiment) -> int:
    """Return the round of a run's newest checkpoint; 0: it has none."""
    return checkpoints.last_round(checkpoints_of(experiment, str(run_dir)))


def refuse_shorter(run_dir: str | Path, experiment: Experiment) -> None:
    """Raise a ConfigError if a run has already done more rounds than the experiment has."""
    finished_rounds = rounds_saved(run_dir, experiment)
    if finished_rounds > experiment.rounds:
        raise ConfigError(
            f"rounds is {experiment.rounds}, but the run in {run_dir} has already done {finished_rounds}, and rounds "
            "cannot be undone; start a new run for fewer."
        )


def is_finished(run_dir: Path) -> bool:
    """Return whether the files in a run's folder can be read and say that the run is complete."""
    summary = _read_summary(run_dir)
    if summary is None or summary["status"] != "finished":
        return False
    return _read_json(run_dir / METADATA) is not None


def ended_at_once(run_dir: Path) -> bool:
    """Return whether a run ended before it had finished a round, and has not begun again since."""
    summary = _read_summary(run_dir)
    return summary is not None and summary["round"] == 0


def divergence(run_dir: Path) -> Diverged | None:
    """Return the error with which a run diverged, as it would again; None if it did not."""
    summary = _read_summary(run_dir)
    return Diverged(summary["error"]) if summary and summary["status"] == "diverged" else None


def reopen(run_dir: Path) -> None:
    """Mark a run that has ended unfinished, so that it can go on; without a finished round, it begins anew."""
    summary = _read_summary(run_dir)
    if ended_at_once(run_dir):
        (run_dir / SUMMARY).unlink()
    elif summary is not None:
        write(run_dir / SUMMARY, json.dumps(summary | {"status": "stopped"}, indent=1))


def _read_summary(run_dir: Path) -> dict[str, Any] | None:
    return _read_json(run_dir / SUMMARY, _SUMMARY_KEYS)


def _read_json(file: Path, keys: Iterable[str] = ()) -> dict[str, Any] | None:
    """Return what a JSON file of a run holds; None if there is none, or something else than a run writes."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        content = json.loads(file.read_text())
        if isinstance(content, dict) and set(keys) <= content.keys():
            return content
    return None


def _require_json(file: Path, keys: Iterable[str] = ()) -> dict[str, Any]:
    """Return what a JSON file of a run holds; raises NoRun if there is none, or something else than a run writes."""
    content = _read_json(file, keys)
    if content is None:
        raise NoRun(f"{file} is damaged; `raypfl resume {file.parent}` writes it again from the run's checkpoint.")
    return content


def recorded_end(folder: Path) -> dict[str, Any]:
    """Return status, round, hash, error and best round of a run that has ended, by their names.

    Raises
    ------
    NoRun : if the file that has them is damaged.
    """
    summary = _require_json(folder / SUMMARY, _SUMMARY_KEYS)
    return {name: summary[name] for name in _SUMMARY_KEYS}


def write_client_names(folder: Path, names: ClientNames) -> None:
    """Write the names of a run's clients into its folder: a row for each client and name."""
    table = pa.table({"client": pa.array(names.clients, pa.int32()), "name": pa.array(names.names, pa.string())})
    with draft(folder / CLIENT_NAMES) as file:
        pq.write_table(table, file)


def _client_names(folder: Path) -> ClientNames | None:
    file = folder / CLIENT_NAMES
    if not file.exists():
        return None
    table = _read_table(file)
    return ClientNames(table["client"].to_numpy(), table["name"].to_pylist())


def recorded_reason(folder: Path, experiment: Experiment) -> str:
    """Return the recorded reason for a run's executor and layout; empty for a new run, or if they were changed."""
    metadata = _read_json(folder / METADATA, ["why"]) or {}
    chosen = {"executor": experiment.engine.executor, "channels_last": bool(experiment.training.channels_last)}
    is_as_before = chosen.items() <= metadata.items()
    return str(metadata["why"]) if is_as_before else ""


def write_tables(folder: Path, finished: RunFinished) -> None:
    """Write a run's tables, its summary and the images that its method logged into its folder."""
    for name, table in finished.tables.items():
        with draft(folder / f"{name}.parquet") as file:
            pq.write_table(table, file)

    images = finished.images.to_pylist() if finished.images else []
    for image in images:
        file = folder / IMAGES / image["name"] / f"{image['round']:06d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        write(file, image["png"])

    # Last, since a run whose folder has a summary counts as ended.
    summary = {name: getattr(finished, name) for name in _SUMMARY_KEYS}
    write(folder / SUMMARY, json.dumps(summary, indent=1))


def newest(run_dir: str | Path, whole: bool = True) -> tuple[Experiment, checkpoints.Snapshot]:
    """Read a run's description and its newest checkpoint; `whole` as in :func:`raypfl.storage.checkpoints.load`."""
    experiment = description(run_dir)
    return experiment, checkpoints.newest(checkpoints_of(experiment, str(run_dir)), whole)


@dataclass(frozen=True, repr=False)
class RunResult:
    """The result of a run.

    Attributes
    ----------
    experiment : the experiment that was run.
    run_dir : the run's folder.
    status : ``finished``, ``stopped``, ``diverged`` or ``failed``.
    round : the last finished round.
    weights_hash : SHA-256 of the final state of server and clients; equal hashes mean equal bits.
    best_round : the best evaluated round by validation data; None without validation.
    metadata : facts found when the run was last started or resumed, see ``events.RunStarted``; `history` has those of
        every start.
    rounds : a row for each round: round, loss, seconds, bytes_up, bytes_down, clients, dropped, failed, cohort; in
        simulated time also late, simulated_seconds, simulated_time (at the round's end), joules.
    evaluations : a row for each (round, client, protocol, model): samples, and every metric.
    ledger : a row for each message: round, exchange, direction, name, clients, numbers and bytes per client, and phase,
        ``training`` or ``prediction``.
    logged : a row for each number that the method logged: round, name, value.
    analysis : the tables that the method logged, by name: round, and the table's own columns.
    images : a row for each PNG file that the method logged: round, name, file.
    privacy : a row for each client and branch of private training, and one for all branches: client, branch, steps,
        epsilon; None without privacy.
    client_names : the clients' names by number; None where they have numbers only.

    Rounds are numbered from 1 in all tables; 0 is before the first round. Functions that take a run's folder, such as
    ``raypfl.trained_models``, take its result too.
    """

    experiment: Experiment
    run_dir: Path
    status: str
    round: int
    weights_hash: str
    best_round: int | None
    metadata: dict[str, Any]
    rounds: pa.Table
    evaluations: pa.Table
    ledger: pa.Table
    logged: pa.Table
    analysis: dict[str, pa.Table]
    images: pa.Table
    privacy: pa.Table | None = None
    client_names: ClientNames | None = None

    def __fspath__(self) -> str:
        return str(self.run_dir)

    @classmethod
    def load(cls, run_dir: str | Path) -> RunResult:
        """Read a result from a run's folder.

        Raises
        ------
        NoRun : if it is not the folder of a run, or its run has not ended.
        """
        folder = Path(run_dir)
        experiment = description(folder)
        if not (folder / SUMMARY).exists() or not (folder / METADATA).exists():
            raise NoRun(f"{folder} has no finished run; `raypfl resume {folder}` finishes an interrupted one.")

        end = recorded_end(folder)
        analysis_files = sorted(folder.glob(f"{ANALYSIS}*.parquet"))
        privacy_file = folder / "privacy.parquet"
        return cls(
            experiment=experiment,
            run_dir=folder,
            status=end["status"],
            round=end["round"],
            weights_hash=end["weights_hash"],
            best_round=end["best_round"],
            metadata=_require_json(folder / METADATA),
            **{name: _read_table(folder / f"{name}.parquet") for name in TABLES},
            analysis={file.stem.removeprefix(ANALYSIS): _read_table(file) for file in analysis_files},
            images=_images(folder),
            privacy=_read_table(privacy_file) if privacy_file.exists() else None,
            client_names=_client_names(folder),
        )

    @property
    def tables(self) -> dict[str, pa.Table]:
        """All tables by the names of their files."""
        tables = {name: getattr(self, name) for name in TABLES}
        tables |= {f"{ANALYSIS}{name}": table for name, table in self.analysis.items()}
        if self.privacy is not None:
            tables["privacy"] = self.privacy
        return tables

    @property
    def counts(self) -> bool:
        """Whether the run can be compared with others: it was evaluated, and neither diverged nor failed."""
        return self.status not in WITHOUT_RESULT and self.evaluations.num_rows > 0

    def __repr__(self) -> str:
        method = METHODS.name_of(type(self.experiment.method))
        return (
            f"<Result: {method}, {self.status} after round {self.round} of {self.experiment.rounds}, in {self.run_dir}>"
        )

    def summary(self, round: int | None = None) -> list[dict[str, Any]]:
        """Return the aggregates of an evaluated round, a dict for each (protocol, model); see ``evaluation.summarise``.

        `round` may be `best_round`; None: the mean over the last rounds, as many as ``evaluation.last``.
        """
        rounds = self.last_rounds if round is None else [round]
        summaries = []
        for number in rounds:
            evaluations = self.evaluations.filter(pc.field("round") == number)
            summaries.append(summarise(self.experiment.measures, evaluations.to_pydict()))
        return summaries[0] if len(summaries) == 1 else _mean_rows(summaries)

    @property
    def last_rounds(self) -> list[int]:
        """The evaluated rounds that results are means over: the last ``evaluation.last`` of them."""
        evaluated = sorted(pc.unique(self.evaluations["round"]).to_pylist())
        return evaluated[-self.experiment.evaluation.last :]

    @property
    def history(self) -> list[dict[str, Any]]:
        """The settings of all rounds, oldest first: a dict for each start or resume of the run.

        ``settings`` and ``metadata`` count from the round after ``from_round`` on, until a later entry takes over.
        ``changed`` names the settings that differ from the entry before. Where a run continues another one, ``parent``
        names that run and its round.
        """
        return history.read(self.run_dir)

    @property
    def megabytes(self) -> tuple[float, float]:
        """Total traffic up and down, in megabytes of 10^6 bytes."""
        # The sum over a run without rounds is None.
        up = pc.sum(self.rounds["bytes_up"]).as_py() or 0
        down = pc.sum(self.rounds["bytes_down"]).as_py() or 0
        return up / 1e6, down / 1e6

    def server_state(self) -> dict[str, Any]:
        """Return the server's final state, from the newest checkpoint."""
        return newest(self.run_dir, whole=False)[1].server

    def server_states(self) -> list[tuple[int, dict[str, Any]]]:
        """Return the server's state after each round whose checkpoint was kept (``checkpoint.every``, ``.keep``)."""
        return checkpoints.server_states(checkpoints_of(self.experiment, str(self.run_dir)))

    def global_model(self) -> Tensor:
        """Return the global model ``[P+B]``.

        Raises
        ------
        ConfigError : if the method has none.
        """
        theta = self.experiment.global_model(self.server_state())
        if theta is None:
            raise ConfigError(f"{type(self.experiment.method).__name__} has no global model.")
        return theta

    def client_state(self, client: int | str) -> dict[str, Any]:
        """Return the state of one client, by name, as NumPy arrays; empty if it never took part or keeps nothing.

        Parameters
        ----------
        client : the client's number or, where clients have names, its name.

        Raises
        ------
        ConfigError : if there is no such client.
        """
        number = number_of(client, self.client_names, self.metadata["num_clients"])
        return newest(self.run_dir)[1].state_of(number)


def _mean_rows(summaries: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the means over rounds of the aggregates of each (protocol, model)."""
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for summary in summaries:
        for row in summary:
            rows.setdefault((row["protocol"], row["model"]), []).append(row)

    means = []
    for (protocol, model), rows_of_rounds in rows.items():
        # A round in which a metric is undefined for all clients lacks it.
        names = dict.fromkeys(name for row in rows_of_rounds for name in row if name not in ("protocol", "model"))
        aggregates = {name: fmean(row[name] for row in rows_of_rounds if name in row) for name in names}
        means.append({"protocol": protocol, "model": model, **aggregates})
    return means


def _read_table(file: Path) -> pa.Table:
    try:
        return read_parquet(str(file))
    except (OSError, pa.ArrowException) as error:
        raise NoRun(
            f"{file} is missing or damaged ({str(error).splitlines()[0]}). Delete {file.parent / SUMMARY}; then "
            f"`raypfl resume {file.parent}` writes all tables again from the run's checkpoint."
        ) from error


def _images(folder: Path) -> pa.Table:
    files = sorted((folder / IMAGES).glob("*/[0-9]*.png"), key=lambda file: (int(file.stem), file.parent.name))
    columns = Columns({"round": "int32", "name": "text", "file": "text"})
    for file in files:
        columns.append(round=int(file.stem), name=file.parent.name, file=str(file))
    return to_arrow(columns)
