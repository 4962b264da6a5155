"""What a command says when its runs are over: a table, where everything is, and what to try next."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from textwrap import fill
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from raypfl.evaluation.measures import Measures
from raypfl.results.contenders import Contender, contenders, labels, setting, settings
from raypfl.results.numbers import prediction, seconds
from raypfl.results.units import Unit, capital, over_seeds
from raypfl.tracking.run import tracking_uri

if TYPE_CHECKING:
    from raypfl.config import Experiment
    from raypfl.runs import Result

_BEST = "*: in the round that is best on the clients' validation data, of each seed."
_PREDICTION = "{}: a client's model, when it is judged, takes {:,.2f} kB up and {:,.2f} kB down beside."
_COSTS = ("MB\nup", "MB\ndown", "seconds")
_NOTE_WIDTH = 78
_UNBOUNDED = 10_000  # columns of a terminal
_SMOOTHS = 0.9  # and above: defaults of options for which a tenth would be too little


@dataclass(frozen=True)
class _Column:
    """An aggregate under its heading, of one of a contender's models or of the one that clients would use."""

    heading: str
    aggregate: str
    measures: Measures
    model: str = ""
    spread: bool = False

    @property
    def unit(self) -> Unit:
        return Unit(self.measures.of(self.aggregate))

    def values(self, contender: Contender, protocol: str, best: bool) -> list[float]:
        """One a seed, in the metric's unit."""
        if self.spread:
            values = contender.spread(protocol, self.aggregate, best)
        else:
            values = contender.scores(protocol, self.model or contender.deployed(protocol), self.aggregate, best)
        return self.unit.of(values)

    def wins(self, values: Sequence[float], rivals: Sequence[Sequence[float]]) -> bool:
        """Whether `values` are the best of several."""
        means, best = [fmean(rival) for rival in rivals if rival], max
        if self.measures.lower_is_better(self.aggregate):
            best = min
        return len(means) > 1 and bool(values) and fmean(values) == best(means)


def table(results: Sequence[Result], without: Sequence[str] = ()) -> Table:
    """A row for each method and protocol; the best of several methods is bold, and several seeds give mean ± std.

    Of samples with several labels each, the macro AUC stands where else the accuracy does, and the calibration error is
    there where it is known. `without` : headings to leave out.
    """
    compared = contenders(results)
    columns = [column for column in _columns(compared) if column.heading not in without]
    costs = [heading for heading in _COSTS if heading not in without]
    words = [word for contender in compared for word in contender.label.split()]
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    drawn.add_column("method", min_width=max(map(len, words)), overflow="fold")
    drawn.add_column("tested on", no_wrap=True)
    for heading in (*(column.heading for column in columns), *costs):
        drawn.add_column(heading, justify="right", no_wrap=True)
    for contender in compared:
        lines = [(protocol, False) for protocol in contender.protocols]
        lines += [(protocol, True) for protocol in contender.protocols if contender.has_best and protocol != "val"]
        for i, line in enumerate(lines):
            rivals = [one for one in compared if one.has_best or not line[1]]
            drawn.add_row(*_row(contender, line, i == 0, rivals, columns, costs), end_section=i == len(lines) - 1)
    return drawn


def show(
    console: Console, results: Sequence[Result], pictures: Mapping[str, Path], tried: Sequence[str], folder: Path
) -> None:
    """Print the table, then where things are and what to try next.

    Parameters
    ----------
    pictures : of the comparison, by their headings.
    tried : the recipe or file that was run, and the assignments that changed it, for the commands that are suggested.
    folder : of the run, or of the comparison.
    """
    judged = [result for result in results if result.evaluations.num_rows]
    if judged:
        console.print()
        console.print(Text(setting(judged[0].experiment, judged[0].metadata), "dim"))
        _show_table(console, judged)
        if any(result.best_round is not None for result in judged):
            console.print(Text(_BEST, "dim"))
    console.print()
    places = _whereabouts(results, pictures)
    width = max(len(heading) for heading, _ in places)
    for heading, text in places:
        console.print(Text.assemble((f"{heading:<{width}}  ", "dim"), text), soft_wrap=True)
    if results[-1].status == "stopped":
        return
    console.print()
    for i, command in enumerate(_next(results, tried, nearby(folder))):
        heading = "" if i else "Try next"
        console.print(Text.assemble((f"{heading:<{width}}  ", "dim"), command), soft_wrap=True)


def _show_table(console: Console, judged: Sequence[Result]) -> None:
    """The table, with those columns for which there is room, and what its numbers are."""
    drawn, left_out = _with_room(console, judged)
    console.print(drawn)
    compared = contenders(judged)
    unit, others = compared[0].unit, _others(compared)
    lower = "" if unit.metric.higher_is_better else " (lower is better)"
    spread = "worst decile" if "std" in left_out else "std, worst decile"
    note = (
        f"{capital(unit.words)}{' in %' if unit.sign else ''}{lower}, mean over clients, of their personal "
        "models and of the global one, tested on a client's own data (local) or on everybody's (global). Spread "
        f"over clients ({spread}): of the personal models, if there are any."
    )
    console.print(Text(fill(note, _NOTE_WIDTH), "dim"))
    named = [column for column in others if column.heading not in left_out and column.unit.metric.words]
    if left_out:
        names = ", ".join(heading.replace("\n", " ") for heading in left_out)
        console.print(Text(fill(f"A wider terminal has room for more columns: {names}.", _NOTE_WIDTH), "dim"))
    if named:
        told = [f"{one.unit.heading}: {one.unit.words}{' in %' if one.unit.sign else ''}" for one in named]
        console.print(Text(fill(f"{'; '.join(told)}, of the models that the spread is of.", _NOTE_WIDTH), "dim"))
    for contender in compared:
        if sent := prediction(contender):
            console.print(Text(_PREDICTION.format(contender.label, *sent), "dim"))


def _with_room(console: Console, judged: Sequence[Result]) -> tuple[Table, Sequence[str]]:
    """The table that fits the console, if need be with methods' names on several lines, and what it is without."""
    unbounded = console.options.update(max_width=_UNBOUNDED)
    compared = contenders(judged)
    names = {one.label for one in compared}
    folded = max(map(len, names)) - max(len(word) for name in names for word in name.split())
    others = list(reversed(_others(compared)))
    extra = {metric.name for metric in compared[0].measures.extra}
    own, asked = ([one.heading for one in others if (one.aggregate in extra) == wanted] for wanted in (False, True))
    dispensable = [*own, "std", "seconds", *asked]
    left_out: Sequence[str] = ()
    drawn = table(judged)
    needed = console.measure(drawn, options=unbounded).maximum
    while needed > console.width and len(left_out) < len(dispensable):
        left_out = dispensable[: len(left_out) + 1]
        drawn = table(judged, left_out)
        needed = console.measure(drawn, options=unbounded).maximum - folded
    return drawn, left_out


def as_json(results: Sequence[Result], pictures: Mapping[str, Path]) -> dict[str, Any]:
    """The same for programs; of the pictures, ``picture`` is the one of results, if there is one."""
    files = {heading.lower().replace(" ", "_"): str(path) for heading, path in pictures.items()}
    return {"picture": None, **files, "runs": [_run_as_json(result) for result in results]}


def nearby(path: Path) -> Path:
    """The path from the current folder, if it is inside."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _whereabouts(results: Sequence[Result], pictures: Mapping[str, Path]) -> list[tuple[str, str]]:
    places = [(heading, str(nearby(path))) for heading, path in pictures.items()]
    for label, result in zip(labels([result.experiment for result in results]), results, strict=True):
        heading = f"{label}, seed {result.experiment.seed}"
        places.append((heading, f"{nearby(result.run_dir)}  weights {result.weights_hash[:12]}"))
    if results[0].experiment.tracking.mlflow:
        uri = tracking_uri(results[0].experiment)
        places.append(("MLflow", uri if uri.startswith("http") else f"mlflow ui --backend-store-uri {uri}"))
    return places


def _columns(compared: Sequence[Contender]) -> list[_Column]:
    measures = compared[0].measures
    name = measures.primary.name
    return [
        _Column("personal", name, measures, "personal"),
        _Column("global", name, measures, "global"),
        _Column("std", "std", measures, spread=True),
        _Column("worst\ndecile", "worst_decile", measures, spread=True),
        *_others(compared),
    ]


def _others(compared: Sequence[Contender]) -> list[_Column]:
    """Of the metrics beside the primary one that tables show and that somebody has."""
    measures = compared[0].measures

    def known(metric: str) -> bool:
        return any(
            one.scores(protocol, model, metric)
            for one in compared
            for protocol in one.protocols
            for model in ("personal", "global")
        )

    return [
        _Column(metric.heading or metric.name, metric.name, measures)
        for metric in measures.others
        if metric.shown and known(metric.name)
    ]


def _row(
    contender: Contender,
    line: tuple[str, bool],
    first: bool,
    rivals: Sequence[Contender],
    columns: Sequence[_Column],
    costs: Sequence[str],
) -> list[Text]:
    protocol, best_round = line
    tested_on = f"{protocol}*" if best_round else protocol
    cells = [Text(contender.label if first else "", f"bold {contender.colour}"), Text(tested_on)]
    for column in columns:
        values, others = column.values(contender, *line), [column.values(rival, *line) for rival in rivals]
        digits = column.unit.digits(value for some in others for value in some)
        cells.append(Text(over_seeds(values, digits), "bold" if column.wins(values, others) else ""))
    megabytes = zip(*(result.megabytes for result in contender.results), strict=True)
    spent = dict(zip(_COSTS, [*map(fmean, megabytes), fmean(map(seconds, contender.results))], strict=True))
    return cells + [Text(f"{spent[heading]:,.1f}" if first else "") for heading in costs]


def _next(results: Sequence[Result], tried: Sequence[str], folder: Path) -> list[str]:
    last = results[-1]
    partition = settings(last.experiment).get("partition", {})
    skewed = ["partition.alpha=0.1"] if "alpha" in partition else []
    return [
        shlex.join(["raypfl", "report", str(folder)]),
        *(_again(tried, options) for options in _other_option(last.experiment)),
        f"{_again(tried, skewed)} --seeds 3",
        shlex.join(["raypfl", "resume", str(folder), f"rounds={2 * last.experiment.rounds}"]),
        "raypfl list methods",
    ]


def _again(tried: Sequence[str], changes: Sequence[str]) -> str:
    """The command that was given, without what `changes` set anew: a comparison's methods too, if they name one."""
    recipe, *before = tried
    new = {change.partition("=")[0] for change in changes}
    kept = [one for one in before if one.partition("=")[0] not in new]
    if "method" in new:
        kept = [one for one in kept if one.partition("=")[0].partition(".")[0] not in ("method", "methods")]
    return shlex.join(["raypfl", "run", recipe, *kept, *changes])


def _other_option(experiment: Experiment) -> list[list[str]]:
    """Assignments that give a method another value of its first number, if it has one."""
    method, kind = experiment.to_dict()["method"], type(experiment.method)
    for key in vars(kind).get("__annotations__", {}):
        value = method.get(key)
        if isinstance(value, float) and value > 0 and (other := _other(value, getattr(kind, key, None))) != value:
            return [[f"method={method['name']}", f"method.{key}={other:g}"]]
    return []


def _other(value: float, default: Any) -> float:
    """A tenth; of what smooths, and so is by default just below one, the middle between it and one."""
    smooths = isinstance(default, float) and _SMOOTHS <= default < 1
    return (1 + value) / 2 if smooths else value / 10


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
