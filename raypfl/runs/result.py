"""What a run leaves behind."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from torch import Tensor

from raypfl.common.errors import ConfigError, NoRun
from raypfl.common.files import draft, write
from raypfl.engine import history
from raypfl.engine.events import Evaluated, Event, RoundFinished, RunFinished, RunStarted
from raypfl.engine.job import checkpoints_of
from raypfl.evaluation import summarise
from raypfl.experiment import Experiment
from raypfl.federation.logged import ANALYSIS, Logged
from raypfl.methods import METHODS
from raypfl.storage import checkpoint
from raypfl.storage.columns import Columns
from raypfl.storage.tables import arrow, read

TABLES = ("rounds", "evaluations", "ledger", "logged")
PICTURES = "images"
SUMMARY = "summary.json"
METADATA = "metadata.json"
RECIPE = "experiment.yaml"
COMPARISON = "comparison.yaml"

_END = ("status", "round", "weights_hash", "error", "best_round")
"""What ``summary.json`` holds, as in :class:`raypfl.engine.events.RunFinished`."""

_NAMED = 6
"""Folders that a sentence names at most."""


def description(run_dir: str | Path) -> Experiment:
    """The experiment that a run's folder describes.

    Raises
    ------
    NoRun : if it is not the folder of a run.
    """
    file = Path(run_dir, RECIPE)
    if not file.exists():
        kind = "a comparison, not a run" if Path(run_dir, COMPARISON).exists() else "not the folder of a run"
        raise NoRun(f"{run_dir} is {kind}: it has no {RECIPE}. {_where_runs_are(Path(run_dir))}")
    return Experiment.from_record(file)


def _where_runs_are(folder: Path) -> str:
    inside = sorted(str(one.parent) for depth in ("*", "*/*") for one in folder.glob(f"{depth}/{RECIPE}"))
    if not inside:
        return "Runs are in the folder that `output` names."
    more = f" and {len(inside) - _NAMED} more" if len(inside) > _NAMED else ""
    return f"Runs are in {', '.join(inside[:_NAMED])}{more}."


def write_description(folder: Path, experiment: Experiment) -> None:
    """Write the experiment into its folder, which makes it a run's folder that can be resumed."""
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / RECIPE, history.note(folder) + experiment.to_yaml())


def forget_unbegun(folder: Path) -> None:
    """Undo `write_description` if the run has not begun; an empty folder is deleted."""
    if not (folder / METADATA).exists():
        (folder / RECIPE).unlink()
        with contextlib.suppress(OSError):
            folder.rmdir()


def rounds_saved(run_dir: str | Path, experiment: Experiment) -> int:
    """The round of a run's newest checkpoint; 0: it has none."""
    return checkpoint.reached(checkpoints_of(experiment, str(run_dir)))


def refuse_shorter(run_dir: str | Path, experiment: Experiment) -> None:
    """Raise a ConfigError if a run has already done more rounds than the experiment has."""
    done = rounds_saved(run_dir, experiment)
    if done > experiment.rounds:
        raise ConfigError(
            f"rounds is {experiment.rounds}, but the run in {run_dir} has already done {done}, and rounds cannot "
            f"be undone; start a new run for fewer."
        )


def is_finished(run_dir: Path) -> bool:
    """Whether a run is complete, and its folder says so in files that can be read."""
    end = _written(run_dir / SUMMARY, _END)
    return end is not None and end["status"] == "finished" and _written(run_dir / METADATA) is not None


def reopen(run_dir: Path) -> None:
    """Mark a finished run unfinished, since it begins again with more rounds."""
    if end := _written(run_dir / SUMMARY, _END):
        write(run_dir / SUMMARY, json.dumps(end | {"status": "stopped"}, indent=1))


def _written(file: Path, keys: Iterable[str] = ()) -> dict[str, Any] | None:
    """What a JSON file of a run holds; None if there is none, or something else than a run writes."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        content = json.loads(file.read_text())
        if isinstance(content, dict) and set(keys) <= content.keys():
            return content
    return None


def _needed(file: Path, keys: Iterable[str] = ()) -> dict[str, Any]:
    """The same; raises NoRun if it is None."""
    if (content := _written(file, keys)) is None:
        raise NoRun(f"{file} is damaged; `raypfl resume {file.parent}` writes it again from the run's checkpoint.")
    return content


def refuse_stranger(client: int, count: int) -> None:
    """Raise a ConfigError unless `client` is one of `count`."""
    if not 0 <= client < count:
        raise ConfigError(f"There is no client {client}; clients are numbered from 0 to {count - 1}.")


def reason_before(folder: Path, experiment: Experiment) -> str:
    """Why a resumed run has its executor and layout; empty for a new run, or if they were changed."""
    metadata = _written(folder / METADATA, ["why"]) or {}
    chosen = {"executor": experiment.engine.executor, "channels_last": bool(experiment.training.channels_last)}
    return str(metadata["why"]) if chosen.items() <= metadata.items() else ""


def write_tables(folder: Path, finished: RunFinished) -> None:
    """Write a run's tables, its summary and the images that its method logged into its folder."""
    for name, table in finished.tables.items():
        with draft(folder / f"{name}.parquet") as file:
            pq.write_table(table, file)
    for image in finished.images.to_pylist() if finished.images else []:
        file = folder / PICTURES / image["name"] / f"{image['round']:06d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        write(file, image["png"])
    end = {name: getattr(finished, name) for name in _END}
    write(folder / SUMMARY, json.dumps(end, indent=1))


def newest(run_dir: str | Path, whole: bool = True) -> tuple[Experiment, checkpoint.Snapshot]:
    """A run's description and its newest checkpoint; `whole` as of :func:`raypfl.storage.checkpoint.load`."""
    experiment = description(run_dir)
    return experiment, checkpoint.newest(checkpoints_of(experiment, str(run_dir)), whole)


@dataclass(frozen=True, repr=False)
class Result:
    """The result of a run.

    Attributes
    ----------
    experiment : what was run. run_dir : its folder.
    status : ``finished``, ``stopped`` or ``failed``. round : rounds finished.
    weights_hash : SHA-256 of the final state of server and clients; equal hashes mean equal bits.
    best_round : the best evaluated round by validation data; None without validation.
    metadata : of the run when it was last started or resumed, see ``events.RunStarted``; `history` has all.
    rounds : a row a round: round, loss, seconds, bytes_up, bytes_down, clients, dropped, failed, cohort.
    evaluations : a row for each (round, client, protocol, model): samples, and every metric.
    ledger : a row for each message: round, exchange, direction, name, clients, numbers and bytes per client, and phase,
        ``training`` or ``prediction``.
    logged : a row for each number that the method logged: round, name, value.
    analysis : the tables that it logged, by name: round, and its own columns.
    images : a row for each PNG file that it logged: round, name, file.
    privacy : a row for each client and branch of private training, and one for all branches: client, branch, steps,
        epsilon; None without privacy.

    Rounds are numbered from 1 in all tables; 0 is before the first round.
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

    @classmethod
    def load(cls, run_dir: str | Path) -> Result:
        """Read a result from a run's folder.

        Raises
        ------
        NoRun : if it is not the folder of a run, or its run has not ended.
        """
        folder = Path(run_dir)
        if not folder.exists():
            raise NoRun(f"There is no folder {folder}. {_where_runs_are(folder)}")
        experiment = description(folder)
        if not all((folder / name).exists() for name in (SUMMARY, METADATA)):
            raise NoRun(f"{folder} has no finished run; `raypfl resume {folder}` finishes an interrupted one.")
        end = _needed(folder / SUMMARY, _END)
        return cls(
            experiment=experiment,
            run_dir=folder,
            status=end["status"],
            round=end["round"],
            weights_hash=end["weights_hash"],
            best_round=end["best_round"],
            metadata=_needed(folder / METADATA),
            **{name: _table(folder / f"{name}.parquet") for name in TABLES},
            analysis={
                file.stem.removeprefix(ANALYSIS): _table(file) for file in sorted(folder.glob(f"{ANALYSIS}*.parquet"))
            },
            images=_images(folder),
            privacy=_table(file) if (file := folder / "privacy.parquet").exists() else None,
        )

    @property
    def tables(self) -> dict[str, pa.Table]:
        """All tables by the names of their files."""
        own = {f"{ANALYSIS}{name}": table for name, table in self.analysis.items()}
        private = {} if self.privacy is None else {"privacy": self.privacy}
        return {name: getattr(self, name) for name in TABLES} | own | private

    def __repr__(self) -> str:
        method = METHODS.name_of(type(self.experiment.method))
        return (
            f"<Result: {method}, {self.status} after round {self.round} of {self.experiment.rounds}, in {self.run_dir}>"
        )

    def summary(self, round: int | None = None) -> list[dict[str, Any]]:
        """The aggregates of an evaluated round, a dict for each (protocol, model); see ``evaluation.summarise``.

        `round` may be `best_round`; None: the mean over the last rounds, as many as ``evaluation.last``.
        """
        rounds = self.last_rounds if round is None else [round]
        of_rounds = [
            summarise(self.experiment.measures, self.evaluations.filter(pc.field("round") == number).to_pydict())
            for number in rounds
        ]
        return of_rounds[0] if len(of_rounds) == 1 else _mean_rows(of_rounds)

    @property
    def last_rounds(self) -> list[int]:
        """The evaluated rounds of which results are means: the last ones, as many as ``evaluation.last``."""
        evaluated = sorted(pc.unique(self.evaluations["round"]).to_pylist())
        return evaluated[-self.experiment.evaluation.last :]

    @property
    def history(self) -> list[dict[str, Any]]:
        """What was in force in which rounds, oldest first: a dict for each time that the run began or was resumed.

        ``settings`` and ``metadata`` count from the round after ``from_round`` on, until a later entry takes over.
        ``changed`` names the settings that differ from the entry before. Where a run continues another one, ``parent``
        names that run and its round.
        """
        return history.read(self.run_dir)

    @property
    def megabytes(self) -> tuple[float, float]:
        """Total traffic up and down, in megabytes of 10^6 bytes."""
        up, down = (pc.sum(self.rounds[name]).as_py() or 0 for name in ("bytes_up", "bytes_down"))
        return up / 1e6, down / 1e6

    def server_state(self) -> dict[str, Any]:
        """The server's final state, from the newest checkpoint."""
        return newest(self.run_dir, whole=False)[1].server

    def server_states(self) -> list[tuple[int, dict[str, Any]]]:
        """The server's state after each round whose checkpoint was kept (``checkpoint.every``, ``.keep``)."""
        return checkpoint.history(checkpoints_of(self.experiment, str(self.run_dir)))

    def global_model(self) -> Tensor:
        """The global model ``[P+B]``.

        Raises
        ------
        ConfigError : if the method has none.
        """
        theta = self.experiment.method.global_model(self.server_state())
        if theta is None:
            raise ConfigError(f"{type(self.experiment.method).__name__} has no global model.")
        return theta

    def client_state(self, client: int) -> dict[str, Any]:
        """The state of one client, by name, as NumPy arrays; empty if it never took part or keeps nothing.

        Raises
        ------
        ConfigError : if there is no such client.
        """
        refuse_stranger(client, self.metadata["num_clients"])
        return newest(self.run_dir)[1].state_of(client)


def _mean_rows(of_rounds: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The means over rounds of the aggregates of each (protocol, model)."""
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for summary in of_rounds:
        for row in summary:
            rows.setdefault((row["protocol"], row["model"]), []).append(row)

    means = []
    for (protocol, model), same in rows.items():
        names = [name for name in same[-1] if name not in ("protocol", "model")]
        aggregates = {name: fmean(row[name] for row in same) for name in names}
        means.append({"protocol": protocol, "model": model, **aggregates})
    return means


def _table(file: Path) -> pa.Table:
    try:
        return read(str(file))
    except (OSError, pa.ArrowException) as error:
        raise NoRun(
            f"{file} is missing or damaged ({str(error).splitlines()[0]}). Delete {file.parent / SUMMARY}; then "
            f"`raypfl resume {file.parent}` writes all tables again from the run's checkpoint."
        ) from error


def _images(folder: Path) -> pa.Table:
    files = sorted((folder / PICTURES).glob("*/[0-9]*.png"), key=lambda file: (int(file.stem), file.parent.name))
    columns = Columns({"round": "int32", "name": "text", "file": "text"})
    for file in files:
        columns.append(round=int(file.stem), name=file.parent.name, file=str(file))
    return arrow(columns)


def events_of(result: Result, uri: str | None = None) -> Iterator[Event]:
    """The events of a tracked run, except checkpoints and warnings.

    `uri` : MLflow's tracking URI; None: that of the experiment.
    """
    changes = ["tracking.mlflow=true", *([f"tracking.uri={json.dumps(uri)}"] if uri else [])]
    yield RunStarted(
        result.run_dir.name,
        str(result.run_dir.resolve()),
        result.experiment.override(changes),
        result.metadata,
        0,
    )
    judged = set(pc.unique(result.evaluations["round"]).to_pylist())
    if 0 in judged:
        yield Evaluated(0, result.summary(0))
    sent = {way: [*accumulate(result.rounds[f"bytes_{way}"].to_pylist())] for way in ("up", "down")}
    for i, row in enumerate(result.rounds.to_pylist()):
        del row["cohort"]
        logged = _logged(result, row["round"])
        yield RoundFinished(**row, bytes_up_total=sent["up"][i], bytes_down_total=sent["down"][i], logged=logged)
        if row["round"] in judged:
            yield Evaluated(row["round"], result.summary(row["round"]))
    end = _needed(result.run_dir / SUMMARY, _END)
    yield RunFinished(**{name: end[name] for name in _END}, tables=result.tables)


def _logged(result: Result, round: int) -> Logged:
    """What the method logged in a round, except its tables, which come whole at the end."""
    values, images = (table.filter(pc.field("round") == round).to_pylist() for table in (result.logged, result.images))
    return Logged(
        values={row["name"]: row["value"] for row in values},
        images={row["name"]: Path(row["file"]).read_bytes() for row in images},
    )
