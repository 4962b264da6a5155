"""The result of a run, read from its folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from torch import Tensor

from raypfl.common.errors import ConfigError, NoRun
from raypfl.data.client_names import ClientNames, number_of
from raypfl.engine import history
from raypfl.engine.job import checkpoints_of
from raypfl.evaluation import summarise
from raypfl.experiment import Experiment
from raypfl.federation.logged import ANALYSIS
from raypfl.methods import METHODS
from raypfl.runs.records import (
    CLIENT_NAMES,
    IMAGES,
    METADATA,
    SUMMARY,
    TABLES,
    WITHOUT_RESULT,
    description,
    newest,
    recorded_end,
    recorded_metadata,
)
from raypfl.storage import checkpoints
from raypfl.storage.columns import Columns
from raypfl.storage.tables import read_parquet, to_arrow


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
            metadata=recorded_metadata(folder),
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
        return mean_summary(self.experiment, self.evaluations, rounds)

    @property
    def last_rounds(self) -> list[int]:
        """The evaluated rounds that results are means over: the last ``evaluation.last`` of them."""
        return counted_rounds(self.experiment, self.evaluations)

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


def counted_rounds(experiment: Experiment, evaluations: pa.Table) -> list[int]:
    """Return the evaluated rounds that results are means over: the last ``evaluation.last`` of them."""
    evaluated = sorted(pc.unique(evaluations["round"]).to_pylist())
    return evaluated[-experiment.evaluation.last :]


def mean_summary(experiment: Experiment, evaluations: pa.Table, rounds: Sequence[int]) -> list[dict[str, Any]]:
    """Return the aggregates of an evaluations table, means over these rounds, as :meth:`RunResult.summary` does."""
    summaries = []
    for number in rounds:
        rows = evaluations.filter(pc.field("round") == number)
        summaries.append(summarise(experiment.measures, rows.to_pydict()))
    return summaries[0] if len(summaries) == 1 else _mean_rows(summaries)


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


def _client_names(folder: Path) -> ClientNames | None:
    file = folder / CLIENT_NAMES
    if not file.exists():
        return None
    table = _read_table(file)
    return ClientNames(table["client"].to_numpy(), table["name"].to_pylist())


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
