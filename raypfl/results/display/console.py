"""Runs in progress on the terminal: a table that is redrawn or, without a terminal, a line now and then."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from raypfl.engine.events import (
    Evaluated,
    Event,
    Listener,
    Progress,
    RoundFinished,
    RunFinished,
    RunStarted,
    ServerProgress,
    Warned,
)
from raypfl.evaluation.measures import Measures
from raypfl.experiment import Experiment
from raypfl.results.colours import colour
from raypfl.results.display.fitting import width_of
from raypfl.results.display.outcome import nearby
from raypfl.results.labels import labels
from raypfl.results.units import Unit

_PACE_ROUNDS = 10  # the pace is that of the last ones: the first ones also warm up


class RunLine:
    """One run's progress; a listener to its events.

    Parameters
    ----------
    label : the name of the run.
    rounds : how many it has; updated when the run starts.
    colour : of its label, as ``#RRGGBB``.
    """

    def __init__(self, label: str, rounds: int = 0, colour: str = "default"):
        self.label, self.rounds, self.colour = label, rounds, colour
        self.status = "waiting"
        self.round = self.first_round = 0
        self.loss: float | None = None
        self.bytes_up = self.bytes_down = 0
        self.unit = Unit(Measures().primary)
        self._scores: dict[str, float] = {}
        self._evaluated = 0
        self._metadata: dict[str, Any] = {}
        self._began: float | None = None
        self._ended: float | None = None
        self._ends: deque[float] = deque(maxlen=_PACE_ROUNDS)

    def __call__(self, event: Event) -> None:
        match event:
            case RunStarted():
                self.status, self.rounds, self._metadata = "running", event.experiment.rounds, event.metadata
                self.first_round = self.round = event.first_round
                self.unit = Unit(event.experiment.measures.primary)
                self._began = time.monotonic()
            case RoundFinished():
                self.round, self.loss = event.round, event.loss
                self.bytes_up, self.bytes_down = event.bytes_up_total, event.bytes_down_total
                self._ends.append(time.monotonic())
            case Evaluated():
                self._scores, self._evaluated = self._means(event.summary), event.round
            case RunFinished():
                self.status, self._ended = event.status, time.monotonic()

    @property
    def seconds(self) -> float:
        """From the run's start to its end, or until now."""
        if self._began is None:
            return 0.0
        return (time.monotonic() if self._ended is None else self._ended) - self._began

    @property
    def clock(self) -> str:
        """``"0:12 left"`` at the pace of the last rounds; ``"0:34"`` once the run has ended."""
        if self._ended is not None:
            return minutes(self.seconds)
        if len(self._ends) < 2:
            return ""
        pace = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return f"{minutes(pace * (self.rounds - self.round))} left"

    @property
    def scores(self) -> str:
        """The primary metric of personal and of global models on the clients' own test data: ``"94.1 / 90.2"``."""
        if not self._scores:
            return ""
        known = [self._scores.get(model) for model in ("personal", "global")]
        return " / ".join("–" if one is None else self.unit.text(one) for one in known)

    @property
    def age(self) -> str:
        """``" (round 2)"`` if `scores` are of that round and others have finished since."""
        return f" (round {self._evaluated})" if self._scores and self._evaluated < self.round else ""

    @property
    def sentence(self) -> str:
        """The scores with the metric's name and unit: ``"personal 94.1 %, global 90.2 %"``."""
        if not self._scores:
            return ""
        name = "" if self.unit.sign else f"{self.unit.heading} "
        known = [(model, self._scores[model]) for model in ("personal", "global") if model in self._scores]
        return name + ", ".join(f"{model} {self.unit.text(one)}{self.unit.sign}" for model, one in known) + self.age

    @property
    def traffic(self) -> str:
        """MB sent up and down so far: ``"3.1 / 3.1"``."""
        return f"{self.bytes_up / 1e6:.1f} / {self.bytes_down / 1e6:.1f}" if self.round > self.first_round else ""

    @property
    def overview(self) -> str:
        """Clients, parameters, executor and actors, in one line."""
        known = self._metadata
        why = f" ({known['why']})" if known.get("why") else ""
        layout = ", channels last" if known.get("channels_last") else ""
        parts = [
            f"{known['num_clients']:,} clients" if "num_clients" in known else "",
            f"{known['parameters']:,} parameters" if "parameters" in known else "",
            known.get("weights", ""),
            f"{known['executor']}{layout} in groups of {known['group_size']}{why}" if "group_size" in known else "",
            f"{known['actors']} actors" if known.get("actors", 1) > 1 else "",
        ]
        return " · ".join(part for part in parts if part)

    def _means(self, summary: list[dict[str, Any]]) -> dict[str, float]:
        """By model, in the metric's unit; none where there was no model to evaluate."""
        protocols = [row["protocol"] for row in summary]
        shown = "local" if "local" in protocols else next(iter(protocols), "")
        name = self.unit.metric.name
        rows = [row for row in summary if row["protocol"] == shown and name in row]
        return {row["model"]: self.unit.factor * row[name] for row in rows}


def lines_for(experiments: Sequence[Experiment]) -> list[RunLine]:
    """A line for each run of a comparison, in order, with its seed where a method has several."""
    names = labels(experiments)
    methods = list(dict.fromkeys(names))
    seeded = len(methods) < len(names)
    return [
        RunLine(f"{name} · seed {one.seed}" if seeded else name, one.rounds, colour(methods.index(name)))
        for one, name in zip(experiments, names, strict=True)
    ]


def server_work(event: ServerProgress) -> str:
    """``"round 3: distilling 120/500"``."""
    of = "" if event.total is None else f"/{event.total}"
    return f"round {event.round}: {event.text} {event.done}{of}"


def minutes(seconds: float) -> str:
    """``"0:34"``, ``"1:02:03"``."""
    whole, rest = divmod(round(seconds), 60)
    hours, whole = divmod(whole, 60)
    return f"{hours}:{whole:02}:{rest:02}" if hours else f"{whole}:{rest:02}"


_MARKS = {
    "waiting": ("·", "dim"),
    "running": ("▸", "cyan"),
    "finished": ("✓", "green"),
    "stopped": ("■", "yellow"),
    "failed": ("✗", "red"),
}

_MOST_LINES = 16
_DISPENSABLE = ("MB up / down", "rounds", "loss", "time")  # columns, where a terminal is narrow
_LONGEST_SILENCE = 30.0  # seconds, if rounds end in between


def warner(console: Console) -> Callable[[str], None]:
    """A function that shows a sentence as a warning, also while runs are shown."""
    return lambda text: console.print(Text.assemble(("Warning: ", "bold yellow"), text))


class View:
    """Shows warnings and nothing else; its subclasses show more. A context manager, entered before the first run.

    Parameters
    ----------
    console : where to show it.
    lines : one for each run, in order.
    """

    def __init__(self, console: Console, lines: Sequence[RunLine]):
        self.console = console
        self.lines = lines

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def listener(self, index: int) -> Listener:
        """The listener for the run at `index`."""
        return partial(self._receive, self.lines[index])

    def _receive(self, line: RunLine, event: Event) -> None:
        line(event)
        with contextlib.suppress(OSError):  # a terminal that is closed must not keep a run from being saved
            if isinstance(event, Warned):
                warner(self.console)(event.text)
            if isinstance(event, Progress) and event.stays:
                self.console.print(Text(event.text), soft_wrap=True)
            else:
                self.update(line, event)

    def update(self, line: RunLine, event: Event) -> None:
        """Show what happened to a run."""


class LiveView(View):
    """A table of the runs, redrawn while they run, with the current step below it.

    If a terminal cannot show all runs, it shows those that are running.
    """

    def __init__(self, console: Console, lines: Sequence[RunLine]):
        super().__init__(console, lines)
        self._spinner = Spinner("dots", style="cyan")
        self._step = "starting Ray"
        self._live = Live(console=console, get_renderable=self.render, refresh_per_second=5)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._step = ""
        self._live.stop()

    def update(self, line: RunLine, event: Event) -> None:
        """Show the current step."""
        match event:
            case Progress():
                self._step = event.text
            case ServerProgress():
                self._step = server_work(event)
            case RunStarted() | RoundFinished():
                self._step = line.overview
            case RunFinished():
                self._step = ""

    def render(self) -> RenderableType:
        """The table as it is now, with the columns for which there is room."""
        table = self._table(())
        for count in range(1, len(_DISPENSABLE) + 1):
            if width_of(self.console, table) > self.console.width:
                table = self._table(_DISPENSABLE[:count])
        if not self._step:
            return table
        self._spinner.update(text=Text(self._step, style="dim"))
        return Group(table, self._spinner)

    def _table(self, without: Sequence[str]) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
        headings = ["", "method", "rounds", " ", "loss", _heading(self.lines), "MB up / down", "time"]
        shown = [i for i, heading in enumerate(headings) if heading not in without]
        for i in shown:
            table.add_column(headings[i], justify="left" if i < 3 else "right", no_wrap=i != 2)
        lines = self.lines
        if len(self.lines) > _MOST_LINES:
            lines = [line for line in self.lines if line.status == "running"]
            ended = sum(line.status not in ("waiting", "running") for line in self.lines)
            table.title = f"{ended} of {len(self.lines)} runs have ended, {len(lines)} are running"
        for line in lines:
            cells = _cells(line)
            table.add_row(*(cells[i] for i in shown))
        return table


class LogView(View):
    """A line of text for about every tenth of a run, and after half a minute without one, for logs and pipes.

    Parameters
    ----------
    clock : seconds, from any beginning.
    """

    def __init__(self, console: Console, lines: Sequence[RunLine], clock: Callable[[], float] = time.monotonic):
        super().__init__(console, lines)
        self._waiting: dict[RunLine, str] = {}
        self._steps: set[str] = set()
        self._clock = clock
        self._printed = clock()

    def __enter__(self) -> Self:
        if (count := len(self.lines)) > 1:
            labels = ", ".join(line.label for line in self.lines[:_MOST_LINES]) + ", ..." * (count > _MOST_LINES)
            self.console.print(f"{count} runs: {labels}", soft_wrap=True, highlight=False, markup=False)
        return self

    def update(self, line: RunLine, event: Event) -> None:
        """Print a line if the event deserves one; the line of a round waits for its evaluation."""
        waiting = self._waiting.pop(line, "")
        if isinstance(event, Evaluated):
            self._waiting[line] = waiting and _round_text(line)
            return
        for text in filter(None, (waiting, self._text(line, event))):
            self.console.print(text, soft_wrap=True, highlight=False, markup=False)
            self._printed = self._clock()
        if isinstance(event, RoundFinished) and (_ends_a_tenth(line) or self._silent_for_long()):
            self._waiting[line] = _round_text(line)

    def _silent_for_long(self) -> bool:
        return self._clock() - self._printed >= _LONGEST_SILENCE

    def _text(self, line: RunLine, event: Event) -> str:
        match event:
            case Progress():  # once, though a comparison prepares for all of its runs and then for each
                known = event.text in self._steps
                self._steps.add(event.text)
                return "" if known else event.text
            case ServerProgress() if self._silent_for_long():
                return f"{line.label}: {server_work(event)}"
            case RunStarted():
                return f"{line.label}: {line.overview}, in {nearby(Path(event.run_dir))}"
            case RunFinished():
                self._steps.clear()
                return ", ".join(filter(None, [f"{line.label}: {_end_text(line)}", line.sentence]))
        return ""


def view(console: Console, lines: Sequence[RunLine], quiet: bool = False) -> View:
    """The view that suits the console."""
    kind = View if quiet else LiveView if console.is_terminal else LogView
    return kind(console, lines)


def _cells(line: RunLine) -> list[RenderableType]:
    mark, style = _MARKS[line.status]
    bar = ProgressBar(max(line.rounds, 1), line.round, width=18, complete_style=line.colour, finished_style=line.colour)
    loss = "" if line.loss is None else f"{line.loss:.3f}"
    values = (f"{line.round}/{line.rounds}", loss, f"{line.scores}{line.age}", line.traffic, f"{line.clock:>9}")
    dim = "dim" if line.status == "waiting" else ""
    return [Text(mark, style), Text(line.label, dim or f"bold {line.colour}"), bar, *(Text(one, dim) for one in values)]


def _heading(lines: Sequence[RunLine]) -> str:
    """The heading of the scores; a run's unit is known once it has started."""
    units = {line.unit for line in lines if line.status != "waiting"} or {line.unit for line in lines}
    if len(units) > 1:
        return "personal / global"
    (unit,) = units
    return f"personal / global{unit.sign}" if unit.sign else f"{unit.heading} personal / global"


def _end_text(line: RunLine) -> str:
    rounds = line.round - line.first_round
    where = f" after round {line.round}" if line.first_round else ""
    return f"{line.status}{where}, {rounds} round{'' if rounds == 1 else 's'} in {minutes(line.seconds)}"


def _round_text(line: RunLine) -> str:
    parts = [f"{line.label}: round {line.round}/{line.rounds}", f"loss {line.loss:.3f}"]
    parts += [line.sentence, f"{line.traffic} MB up / down", line.clock]
    return ", ".join(filter(None, parts))


def _ends_a_tenth(line: RunLine) -> bool:
    return line.round * 10 // line.rounds > (line.round - 1) * 10 // line.rounds
