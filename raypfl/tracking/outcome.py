"""What a command says when its runs are over: a table, where everything is, and what to try next."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from raypfl.tracking.contenders import Contender, contenders, labels, over_seeds, setting
from raypfl.tracking.mlflow_run import tracking_uri
from raypfl.tracking.numbers import seconds

if TYPE_CHECKING:
    from raypfl.config import Experiment
    from raypfl.federation import Result

_NOTE = """\
Accuracy in %, mean over clients, of their personal models and of the global
one, tested on a client's own data (local) or on everybody's (global). Spread
over clients (std, worst decile): of the personal models, if there are any."""
_BEST = "*: in the round that is best on the clients' validation data, of each seed."
_COLUMNS = ("personal", "global", "std", "worst\ndecile", "MB\nup", "MB\ndown", "seconds")
_NAMED = 4  # runs; the command on more of them takes the whole folder
_BEST_IS_HIGHEST = (True, True, False, True)


def table(results: Sequence[Result]) -> Table:
    """A row for each method and protocol; the best of several methods is bold, and several seeds give mean ± std."""
    compared = contenders(results)
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    drawn.add_column("method")
    drawn.add_column("tested on", no_wrap=True)
    for heading in _COLUMNS:
        drawn.add_column(heading, justify="right", no_wrap=True)
    for contender in compared:
        lines = [(protocol, False) for protocol in contender.protocols]
        lines += [(protocol, True) for protocol in contender.protocols if contender.has_best and protocol != "val"]
        for i, line in enumerate(lines):
            rivals = [_metrics(one, *line) for one in compared if one.has_best or not line[1]]
            drawn.add_row(*_row(contender, line, i == 0, rivals), end_section=i == len(lines) - 1)
    return drawn


def show(console: Console, results: Sequence[Result], pictures: Mapping[str, Path], tried: str) -> None:
    """Print the table, then where things are and what to try next.

    Parameters
    ----------
    pictures : of the comparison, by their headings.
    tried : the recipe or file that was run, for the commands that are suggested.
    """
    judged = [result for result in results if result.evaluations.num_rows]
    if judged:
        console.print()
        console.print(Text(setting(judged[0].experiment), "dim"))
        console.print(table(judged))
        console.print(Text(_NOTE, "dim"))
        if any(result.best_round is not None for result in judged):
            console.print(Text(_BEST, "dim"))
    console.print()
    facts = _whereabouts(results, pictures)
    width = max(len(heading) for heading, _ in facts)
    for heading, text in facts:
        console.print(Text.assemble((f"{heading:<{width}}  ", "dim"), text), soft_wrap=True)
    console.print()
    for i, command in enumerate(_next(results, tried)):
        heading = "" if i else "Try next"
        console.print(Text.assemble((f"{heading:<{width}}  ", "dim"), command), soft_wrap=True)


def as_json(results: Sequence[Result], pictures: Mapping[str, Path]) -> dict[str, Any]:
    """The same for programs; of the pictures, ``picture`` is the one of accuracies, if there is one."""
    files = {heading.lower().replace(" ", "_"): str(path) for heading, path in pictures.items()}
    return {"picture": None, **files, "runs": [_run_as_json(result) for result in results]}


def nearby(path: Path) -> Path:
    """The path from the current folder, if it is inside."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _whereabouts(results: Sequence[Result], pictures: Mapping[str, Path]) -> list[tuple[str, str]]:
    facts = [(heading, str(nearby(path))) for heading, path in pictures.items()]
    for label, result in zip(labels([result.experiment for result in results]), results, strict=True):
        heading = f"{label}, seed {result.experiment.seed}"
        facts.append((heading, f"{nearby(result.run_dir)}  weights {result.weights_hash[:12]}"))
    if results[0].experiment.tracking.mlflow:
        uri = tracking_uri(results[0].experiment)
        facts.append(("MLflow", uri if uri.startswith("http") else f"mlflow ui --backend-store-uri {uri}"))
    return facts


def _metrics(contender: Contender, protocol: str, best: bool) -> list[list[float]]:
    cells = [contender.scores(protocol, model, "accuracy", best) for model in ("personal", "global")]
    cells += [contender.spread(protocol, metric, best) for metric in ("std", "worst_decile")]
    return [[100 * value for value in values] for values in cells]


def _row(contender: Contender, line: tuple[str, bool], first: bool, rivals: list[list[list[float]]]) -> list[Text]:
    protocol, best_round = line
    tested_on = f"{protocol}*" if best_round else protocol
    cells = [Text(contender.label if first else "", f"bold {contender.colour}"), Text(tested_on)]
    for i, values in enumerate(_metrics(contender, *line)):
        others = [fmean(rival[i]) for rival in rivals if rival[i]]
        best = max(others, default=0.0) if _BEST_IS_HIGHEST[i] else min(others, default=0.0)
        wins = len(others) > 1 and bool(values) and fmean(values) == best
        cells.append(Text(over_seeds(values), "bold" if wins else ""))
    megabytes = zip(*(result.megabytes for result in contender.results), strict=True)
    costs = [*map(fmean, megabytes), fmean(map(seconds, contender.results))]
    return cells + [Text(f"{cost:,.1f}" if first else "") for cost in costs]


def _next(results: Sequence[Result], tried: str) -> list[str]:
    run, last = f"raypfl run {tried}", results[-1]
    if last.status == "stopped":
        return [f"raypfl resume {nearby(last.run_dir)}", "raypfl list methods"]
    return [
        _report(results),
        *_with_other_option(run, last.experiment),
        f"{run} partition.alpha=0.1 --seeds 3" if hasattr(last.experiment.partition, "alpha") else f"{run} --seeds 3",
        f"raypfl resume {nearby(last.run_dir)} rounds={2 * last.experiment.rounds}",
        "raypfl list methods",
    ]


def _report(results: Sequence[Result]) -> str:
    folders = [nearby(result.run_dir) for result in results]
    named = [shlex.quote(str(folder)) for folder in folders]
    return " ".join(["raypfl report", *(named if len(named) <= _NAMED else [str(folders[0].parent)])])


def _with_other_option(run: str, experiment: Experiment) -> list[str]:
    method = experiment.to_dict()["method"]
    own = vars(type(experiment.method)).get("__annotations__", {})
    numbers = [key for key in own if isinstance(method.get(key), float) and method[key] > 0]
    return [f"{run} method={method['name']} method.{key}={method[key] / 10:g}" for key in numbers[:1]]


def _run_as_json(result: Result) -> dict[str, Any]:
    up, down = result.megabytes
    return {
        "experiment": result.experiment.to_dict(),
        "run_dir": str(result.run_dir),
        "status": result.status,
        "weights_hash": result.weights_hash,
        "best_round": result.best_round,
        "megabytes_up": up,
        "megabytes_down": down,
        "seconds": seconds(result),
        "summary": result.summary(),
        "summary_of_best_round": [] if result.best_round is None else result.summary(result.best_round),
    }
