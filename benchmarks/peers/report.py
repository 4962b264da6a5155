"""Statistics, ratios, a page and a picture from the results of runs."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.jobs import (
    ACTORS,
    BARE,
    BF16,
    CHANNELS_LAST,
    CONTENDERS,
    FLOWER,
    FLUKE,
    INLINE,
    JOBS,
    PFL,
    PFL_TWO,
    Contender,
)
from benchmarks.peers.measure import Patience
from raypfl.runs.choices.autotune import Candidate

BEGIN, END = "<!-- peers -->", "<!-- /peers -->"
FP32 = (INLINE, CHANNELS_LAST, ACTORS)
GIB = 1 << 30


@dataclass(frozen=True)
class Summary:
    """All runs of a contender at a job.

    Attributes
    ----------
    median, best : the seconds a round, over the counted rounds of all runs; None if none was counted.
    startup : the median seconds to the end of the first round.
    memory : the highest memory, in bytes.
    rounds, runs : the numbers of counted rounds and of runs.
    problem : the problem of a run, if there was any.
    chosen : the executor that a run of raypfl chose, and in how many runs if they differ; empty for the others.
    """

    median: float | None
    best: float | None
    startup: float | None
    memory: int | None
    rounds: int
    runs: int
    problem: str | None
    chosen: str


def summarise(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Summary]]:
    """Job -> contender -> summary, both in the order in which `jobs` names them."""
    table: dict[str, dict[str, Summary]] = {}
    for job in JOBS:
        for contender in CONTENDERS:
            of_contender = [run for run in runs if (run["job"], run["contender"]) == (job, contender.name)]
            if of_contender:
                table.setdefault(job, {})[contender.name] = _summary(of_contender)
    return table


def _summary(runs: Sequence[Mapping[str, Any]]) -> Summary:
    rounds = [seconds for run in runs for seconds in run["rounds"]]
    startups = [run["startup"] for run in runs if run["startup"] is not None]
    return Summary(
        median=statistics.median(rounds) if rounds else None,
        best=min(rounds, default=None),
        startup=statistics.median(startups) if startups else None,
        memory=max((run["memory"] for run in runs if run["memory"]), default=None),
        rounds=len(rounds),
        runs=len(runs),
        problem=next((run["problem"] for run in runs if run["problem"]), None),
        chosen=_chosen(runs),
    )


def _chosen(runs: Sequence[Mapping[str, Any]]) -> str:
    ways = Counter(str(Candidate(**run["notes"])) for run in runs if run.get("notes"))
    if len(ways) == 1:
        return next(iter(ways))
    return "; ".join(f"{way} in {count} of {ways.total()} runs" for way, count in ways.items())


@dataclass(frozen=True)
class Target:
    """A target for a ratio.

    Attributes
    ----------
    what : the description.
    bound : the ratio.
    at_least : whether the bound is to be reached; else it must not be exceeded.
    above, below : (job, contenders) whose medians are divided; of several contenders the fastest counts.
    value : the `Summary` field that is divided: ``median`` or ``startup``.
    """

    what: str
    bound: float
    above: tuple[str, tuple[str, ...]]
    below: tuple[str, tuple[str, ...]]
    value: str = "median"
    at_least: bool = True

    def measured(self, table: Mapping[str, Mapping[str, Summary]]) -> float | None:
        """The ratio; None if one of its sides was not measured."""
        above = self._side(table, *self.above)
        below = self._side(table, *self.below)
        if above is None or not below:
            return None
        return above / below

    def is_met(self, ratio: float) -> bool:
        return ratio >= self.bound if self.at_least else ratio <= self.bound

    def _side(self, table: Mapping[str, Mapping[str, Summary]], job: str, names: Sequence[str]) -> float | None:
        values = [getattr(table.get(job, {}).get(name), self.value, None) for name in names]
        return min((value for value in values if value is not None), default=None)


def _faster(job: str, ours: Sequence[Contender], theirs: Contender, bound: float, what: str) -> Target:
    return Target(f"`{job}`: {what}", bound, (job, (theirs.name,)), (job, tuple(c.name for c in ours)))


def _at_most(bound: float, what: str, ours: Contender, job: str, theirs: Contender, beside: str, **of: str) -> Target:
    return Target(f"`{job}`: {what}", bound, (job, (ours.name,)), (beside, (theirs.name,)), at_least=False, **of)


_ANY = "raypfl's fastest in fp32 against"
_START = "start-up to the end of the first round, relative to Flower's"
TARGETS = (
    _faster("cnn", FP32, PFL, 2.0, f"{_ANY} pfl-research's one process"),
    _faster("cnn", FP32, FLOWER, 2.0, f"{_ANY} Flower"),
    _faster("cnn", (CHANNELS_LAST,), BARE, 1.15, "one process, channels last, against the bare loop"),
    _faster("cnn", (BF16,), BARE, 1.7, "one process, bf16, against the bare loop"),
    _faster("cnn", (ACTORS,), INLINE, 1.85, "two actors against one process"),
    _faster("mlp", FP32, PFL, 6.0, f"{_ANY} pfl-research's one process"),
    _faster("mlp", FP32, FLOWER, 30.0, f"{_ANY} Flower"),
    _faster("mlp", (INLINE,), BARE, 6.0, "one process against the bare loop"),
    _faster("lenet", (INLINE, CHANNELS_LAST), BARE, 1.0, "one process against the bare loop"),
    _faster("lenet", (ACTORS,), BARE, 1.8, "two actors against the bare loop"),
    *(
        _at_most(1.1, f"{c.name}, a round relative to the small population's", c, "population", c, "small-population")
        for c in (INLINE, ACTORS)
    ),
    *(_at_most(0.5, _START, ACTORS, job, FLOWER, job, value="startup") for job in ("cnn", "mlp", "lenet")),
    _at_most(1.2, "one process relative to the forward passes alone", INLINE, "evaluation", BARE, "evaluation"),
)

IN_SHORT = {
    "mlp": "MLP of 9,610, 50 of 1,000 clients",
    "population": "the same, 1,000 of 100,000 clients",
    "cnn": "CNN of 1,626,442, 50 of 1,000 clients",
    "lenet": "LeNet of 121,182, 5 of 100 clients",
}
"""Job -> what it is, in the README's table."""

ALIKE: tuple[tuple[Contender, Contender], ...] = ((INLINE, PFL), (INLINE, FLUKE), (ACTORS, PFL_TWO), (ACTORS, FLOWER))
"""Ours and theirs, with as many processes at work. Targets compare what is fastest, whatever it takes."""


def page(results: Mapping[str, Any]) -> str:
    """The Markdown between the marks in the documentation."""
    table = summarise(results["runs"])
    picture = "![Seconds per round, by job and system](performance/peers.png)"
    parts = [_about(results), picture, _targets(table), _alike(table)]
    parts += [_job(name, rows) for name, rows in table.items()]
    return "\n\n".join(filter(None, parts)) + "\n"


def summary(results: Mapping[str, Any]) -> str:
    """The Markdown between the marks in the README: each system at its fastest in fp32, on one process or two."""
    table = summarise(results["runs"])
    systems: dict[str, tuple[Contender, ...]] = {
        "bare PyTorch loop": (BARE,),
        "raypfl": FP32,
        "Flower": (FLOWER,),
        "pfl-research": (PFL, PFL_TWO),
        "fluke": (FLUKE,),
    }

    lines = [_cells("", *systems), _cells(*["---"] * (1 + len(systems)))]
    for job, description in IN_SHORT.items():
        seconds = {name: _fastest(table.get(job, {}), contenders) for name, contenders in systems.items()}
        seconds["raypfl"] = f"**{seconds['raypfl']}**"
        lines.append(_cells(description, *seconds.values()))

    verdicts = Counter(verdict for *_, verdict in _target_rows(table))
    lines += [
        "",
        "Each ran in fp32, at its fastest with one or two processes ([how this was measured](docs/performance.md)). Of "
        f"{verdicts['met'] + verdicts['not met']} targets that were measured, {verdicts['not met']} were missed.",
    ]
    return "\n".join(lines) + "\n"


def _fastest(rows: Mapping[str, Summary], contenders: Sequence[Contender]) -> str:
    medians = [rows[c.name].median for c in contenders if c.name in rows]
    counted = [median for median in medians if median is not None]
    if counted:
        return f"{min(counted):.2g}"
    return f"over {Patience.limit:.0f}" if medians else "—"  # a run without a finished round took that long


def _cells(*cells: str) -> str:
    return "| " + " | ".join(cells).strip() + " |"


def _about(results: Mapping[str, Any]) -> str:
    machine = results["machine"]
    versions = {}
    for of_system in results["versions"].values():
        versions.update(of_system)
    names = {"flwr": "Flower", "pfl": "pfl-research", "fluke-fl": "fluke"}
    systems = ", ".join(f"{names.get(n, n)} {versions[n]}" for n in ("raypfl", *names) if n in versions)
    lines = [
        f"Measured on {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']:.0f} GiB, with {systems};\n"
        f"torch {_each(results, 'torch')}; Ray {_each(results, 'ray')}."
    ]
    lines.append(_origin(results["runs"]))
    lines += [f"Not measured: {sentence}" for sentence in results["left_out"].values()]
    return "\n".join(lines)


def _origin(runs: Sequence[Mapping[str, Any]]) -> str:
    """The commits and dates of the runs, and the machine's load."""
    dates: dict[str, set[str]] = {}
    for run in runs:
        name = f"commit {run['commit']}" if run["commit"] else "no known commit"
        dates.setdefault(name, set()).add(run["date"].partition("T")[0])
    commits = ", ".join(f"{commit} ({_span(sorted(days))})" for commit, days in dates.items())
    loads = sorted(run["load"] for run in runs)
    return f"Runs of {commits}; load averages at their start: {loads[0]:.1f} to {loads[-1]:.1f}."


def _span(days: Sequence[str]) -> str:
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"


def _each(results: Mapping[str, Any], package: str) -> str:
    """A package's version, or its versions by environment where they differ."""
    by_system = {}
    for system, versions in results["versions"].items():
        if package in versions and system != "bare":
            by_system[system] = versions[package]
    if len(set(by_system.values())) == 1:
        return next(iter(by_system.values()))
    return ", ".join(f"{version} ({system})" for system, version in by_system.items())


def _targets(table: Mapping[str, Mapping[str, Summary]]) -> str:
    rows = [_cells(*row) for row in _target_rows(table)]
    return "\n".join(["| target | bound | measured | |", "|---|---|---|---|", *rows])


def _target_rows(table: Mapping[str, Mapping[str, Summary]]) -> list[tuple[str, str, str, str]]:
    """Return each target with its bound, what was measured, and whether that meets it."""
    rows = []
    for target in TARGETS:
        ratio = target.measured(table)
        sign = "≥" if target.at_least else "≤"
        rows.append((target.what, f"{sign} {target.bound:g}x", _times(ratio), _verdict(target, ratio)))
    return [
        *rows,
        _memory_target(table, INLINE.name, "in one process"),
        _memory_target(table, ACTORS.name, "on two actors"),
    ]


def _verdict(target: Target, ratio: float | None) -> str:
    if ratio is None:
        return "not measured"
    return "met" if target.is_met(ratio) else "not met"


def _memory_target(table: Mapping[str, Mapping[str, Summary]], contender: str, where: str) -> tuple[str, str, str, str]:
    memory = getattr(table.get("population", {}).get(contender), "memory", None)
    bound = JOBS["population"].noise.bytes + GIB
    measured = "—"
    verdict = "not measured"
    if memory is not None:
        measured = _gib(memory)
        verdict = "met" if memory <= bound else "not met"
    return f"`population`: memory {where}: the data and 1 GiB", f"≤ {_gib(bound)}", measured, verdict


def _alike(table: Mapping[str, Mapping[str, Summary]]) -> str:
    """The other systems' medians divided by raypfl's, where both have as many processes at work."""
    compared = []
    for job, rows in table.items():
        ratios = [_ratio(rows.get(theirs.name), rows.get(ours.name)) for ours, theirs in ALIKE]
        if any(ratios):
            compared.append(_cells(f"`{job}`", *map(_times, ratios)))
    if not compared:
        return ""
    head = ["", *(f"{theirs.name} / {ours.name}" for ours, theirs in ALIKE)]
    title = "Each system's median divided by raypfl's, with the same number of working processes on both sides:"
    return "\n".join([title, "", "| " + " | ".join(head) + " |", "|---" * len(head) + "|", *compared])


def _ratio(above: Summary | None, below: Summary | None) -> float | None:
    """The ratio of two medians; None if one of them was not measured."""
    if above is None or below is None or above.median is None or not below.median:
        return None
    return above.median / below.median


def _job(name: str, rows: Mapping[str, Summary]) -> str:
    floor = rows.get(BARE.name)
    lines = [
        f"### `{name}`: {JOBS[name].about}",
        "",
        "| | s/round, median | min | speed-up over bare loop | start-up, s | memory | rounds counted |",
        "|---|---|---|---|---|---|---|",
    ]
    notes: dict[str, list[str]] = {}  # a sentence, and the contenders of which it is true
    for contender, reason in JOBS[name].left_out.items():
        notes.setdefault(f"{reason}.", []).append(contender)
    for contender, row in rows.items():
        lines.append(cells(contender, row, floor))
        if row.chosen:
            notes.setdefault(f"chose {row.chosen}.", []).append(contender)
        if row.problem:
            notes.setdefault(row.problem, []).append(contender)
    bullets = [f"- {'; '.join(contenders)}: {sentence}" for sentence, contenders in notes.items()]
    return "\n".join([*lines, *([""] if bullets else []), *bullets])


def cells(contender: str, row: Summary, floor: Summary | None = None) -> str:
    """A contender's row in its job's table."""
    startup = "—" if row.startup is None else f"{row.startup:.1f}"
    memory = "—" if row.memory is None else _gib(row.memory)
    seconds = (_seconds(row.median), _seconds(row.best), _times(_ratio(floor, row)))
    return _cells(contender, *seconds, startup, memory, f"{row.rounds} in {row.runs}")


def _times(ratio: float | None) -> str:
    return "—" if ratio is None else f"{ratio:.2f}x"


def _seconds(value: float | None) -> str:
    if value is None:
        return "—"
    return f"{value:.3g}" if value >= 1 else f"{value:.4f}"


def _gib(count: float) -> str:
    return f"{count / GIB:.2f} GiB"


def insert(document: str, text: str, begin: str = BEGIN, end: str = END) -> str:
    """Replace the text between the marks of a document.

    Raises
    ------
    ValueError : if it has not both marks, in their order.
    """
    before, begin_mark, rest = document.partition(begin)
    _, end_mark, after = rest.partition(end)
    if not begin_mark or not end_mark:
        raise ValueError(f"The page has no place for the table: put {begin} and {end} on lines of their own.")
    return f"{before}{begin}\n{text}{end}{after}"


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Seconds a round on a logarithmic axis: a column for each job, a mark for each contender; raypfl's are round."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullFormatter

    table = summarise(results["runs"])
    names = [c.name for c in CONTENDERS if any(c.name in rows for rows in table.values())]
    ink = "#222222"

    figure = Figure(figsize=(12, 5.6), facecolor="white", layout="constrained")
    axes = figure.add_subplot(facecolor="white")
    for at in range(0, len(table), 2):
        axes.axvspan(at - 0.5, at + 0.5, color="#f3f3f3", zorder=0)

    for i, name in enumerate(names):
        offset = 0.8 * ((i + 0.5) / len(names) - 0.5)
        places = []
        medians = []
        for at, rows in enumerate(table.values()):
            if name in rows and rows[name].median:
                places.append(at + offset)
                medians.append(rows[name].median)
        style = {"color": COLOURS[name], "markeredgecolor": ink, "markeredgewidth": 0.6, "markersize": 9}
        axes.plot(places, medians, _marker(name), label=name, **style)

    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel("seconds a round (median, logarithmic)", color=ink)
    axes.set_xlabel("job", color=ink)
    axes.set_xticks(range(len(table)), list(table))
    axes.set_xlim(-0.5, len(table) - 0.5)
    axes.tick_params(colors=ink)
    axes.grid(axis="y", which="both", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=5, frameon=False, labelcolor=ink)

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _marker(contender: str) -> str:
    if contender.startswith("raypfl"):
        return "o"
    return "D" if contender == BARE.name else "s"


COLOURS = dict(
    zip(
        (c.name for c in CONTENDERS),
        ("#9a9a9a", "#9ecae1", "#4292c6", "#08519c", "#17becf", "#fdae6b", "#e6550d", "#31a354", "#756bb1"),
        strict=True,
    )
)
