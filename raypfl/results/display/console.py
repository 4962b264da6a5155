"""Runs in progress on the terminal: a table that is redrawn or, without a terminal, a line now and then."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from raypfl.common.counting import counted
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
from raypfl.results.display.fitting import width_of
from raypfl.results.display.outcome import nearby
from raypfl.results.display.run_line import RunLine, minutes, server_step

_LABEL_WIDTH = 48  # characters; a longer label continues on another line

_MARKS = {
    "waiting": ("·", "dim"),
    "running": ("▸", "cyan"),
    "finished": ("✓", "green"),
    "stopped": ("■", "yellow"),
    "diverged": ("✗", "red"),
    "failed": ("✗", "red"),
}

_MOST_LINES = 16
_DISPENSABLE = ("MB up / down", "rounds", "loss", "time")  # columns, where a terminal is narrow
_LONGEST_SILENCE = 30.0  # seconds between lines, as long as rounds end


def warner(console: Console) -> Callable[[str], None]:
    """Return a function that shows a sentence as a warning, also while runs are shown."""
    # A file or a pipe keeps a sentence on one line, where it can be searched for.
    one_line = not console.is_terminal
    return lambda text: console.print(Text.assemble(("Warning: ", "bold yellow"), text), soft_wrap=one_line)


def step_printer(console: Console, quiet: bool) -> Listener:
    """Return a listener that prints each step of a preparation, or nothing if `quiet`."""

    def receive(event: Event) -> None:
        if isinstance(event, Progress) and not quiet:
            console.print(Text(event.text, "dim"))

    return receive


class View:
    """Shows warnings and nothing else; its subclasses show more. A context manager, entered before the first run.

    Parameters
    ----------
    console : the terminal, file or pipe.
    lines : one for each run, in order.
    """

    def __init__(self, console: Console, lines: Sequence[RunLine]):
        self.console = console
        self.lines = lines
        self._warned: dict[str, list[str]] = {}
        """The labels of the runs that had each warning."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError):
            for text, labels in self._warned.items():
                if len(labels) > 1:
                    self._warn(f"{labels[0]} and {counted(len(labels) - 1, 'more run')}", text)

    def listener(self, index: int) -> Listener:
        """Return the listener for the run at `index`."""
        return partial(self._receive, self.lines[index])

    def _receive(self, line: RunLine, event: Event) -> None:
        line(event)
        with contextlib.suppress(OSError):  # a terminal that is closed must not keep a run from being saved
            if isinstance(event, Warned):
                labels = self._warned.setdefault(event.text, [])
                if not labels:  # further runs with this warning are counted at the end
                    self._warn(line.label, event.text)
                if line.label not in labels:
                    labels.append(line.label)
            if isinstance(event, Progress) and event.stays:
                self.console.print(Text(event.text), soft_wrap=True)
            else:
                self.update(line, event)

    def update(self, line: RunLine, event: Event) -> None:
        """Show what happened to a run."""

    def _warn(self, label: str, text: str) -> None:
        """Show a warning, with the label of the run if there are several."""
        warner(self.console)(f"{label}: {text}" if len(self.lines) > 1 else text)


class LiveView(View):
    """Shows a table of the runs, redrawn while they run, with the current step below it.

    If a terminal cannot show all runs, it shows those that are running.
    """

    def __init__(self, console: Console, lines: Sequence[RunLine]):
        super().__init__(console, lines)
        self._spinner = Spinner("dots", style="cyan")
        self._step = ""
        self._live = Live(console=console, get_renderable=self.render, refresh_per_second=5)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._step = ""
        self._live.stop()
        super().__exit__(*error)

    def update(self, line: RunLine, event: Event) -> None:
        """Show the current step."""
        match event:
            case Progress():
                self._step = event.text
            case ServerProgress():
                self._step = server_step(event)
            case RunStarted() | RoundFinished():
                self._step = line.overview
            case RunFinished():
                self._step = ""
                if event.error and len(self.lines) > 1:
                    self._warn(line.label, event.error)

    def render(self) -> RenderableType:
        """Return the table as it is now, with the columns for which there is room."""
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
        texts = ["", "method", "rounds"]
        numbers = [" ", "loss", _heading(self.lines), "MB up / down", "time"]
        headings = [*texts, *numbers]
        shown = [i for i, heading in enumerate(headings) if heading not in without]
        for i in shown:
            # Where room is short, the bar shrinks first.
            is_bar = headings[i] == "rounds"
            table.add_column(headings[i], justify="left" if i < len(texts) else "right", no_wrap=not is_bar)

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
    """Prints a line for about every tenth of a run, and after half a minute without one, for logs and pipes.

    Parameters
    ----------
    clock : returns the time in seconds, from any origin.
    """

    def __init__(self, console: Console, lines: Sequence[RunLine], clock: Callable[[], float] = time.monotonic):
        super().__init__(console, lines)
        self._waiting: dict[RunLine, str] = {}
        self._printed_steps: set[str] = set()
        self._clock = clock
        self._last_print = clock()

    def __enter__(self) -> Self:
        count = len(self.lines)
        if count > 1:
            labels = ", ".join(line.label for line in self.lines[:_MOST_LINES])
            if count > _MOST_LINES:
                labels += ", ..."
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
            self._last_print = self._clock()

        if isinstance(event, RoundFinished) and (_ends_a_tenth(line) or self._silent_for_long()):
            self._waiting[line] = _round_text(line)

    def _silent_for_long(self) -> bool:
        return self._clock() - self._last_print >= _LONGEST_SILENCE

    def _text(self, line: RunLine, event: Event) -> str:
        match event:
            case Progress():  # once, though a comparison prepares for all of its runs and then for each
                is_printed = event.text in self._printed_steps
                self._printed_steps.add(event.text)
                return "" if is_printed else event.text
            case ServerProgress() if self._silent_for_long():
                return f"{line.label}: {server_step(event)}"
            case RunStarted():
                return f"{line.label}: {line.overview}, in {nearby(Path(event.run_dir))}"
            case RunFinished():
                self._printed_steps.clear()
                end = ", ".join(filter(None, [f"{line.label}: {_end_text(line)}", line.sentence]))
                # Of several runs, the others go on: a command tells of the error when all have ended.
                return f"{end}\n{line.label}: {event.error}" if event.error and len(self.lines) > 1 else end
        return ""


def view(console: Console, lines: Sequence[RunLine], quiet: bool = False) -> View:
    """Return the view that suits the console."""
    if quiet:
        return View(console, lines)
    if console.is_terminal:
        return LiveView(console, lines)
    return LogView(console, lines)


def _cells(line: RunLine) -> list[RenderableType]:
    """Return the cells of a run's row: mark, label, bar, and numbers as texts."""
    mark, mark_style = _MARKS[line.status]
    dim = "dim" if line.status == "waiting" else ""
    label = Text(fill(line.label, _LABEL_WIDTH), dim or f"bold {line.colour}")
    bar = ProgressBar(max(line.rounds, 1), line.round, width=18, complete_style=line.colour, finished_style=line.colour)

    loss = "" if line.loss is None else f"{line.loss:.3f}"
    texts = (f"{line.round}/{line.rounds}", loss, f"{line.scores}{line.score_round}", line.traffic, f"{line.clock:>9}")
    return [Text(mark, mark_style), label, bar, *(Text(text, dim) for text in texts)]


def _heading(lines: Sequence[RunLine]) -> str:
    """Return the heading of the scores; a run's unit is known once it has started."""
    units = {line.unit for line in lines if line.status != "waiting"} or {line.unit for line in lines}
    if len(units) > 1:
        return "personal / global"
    (unit,) = units
    if unit.sign:
        return f"personal / global{unit.sign}"
    return f"{unit.heading} personal / global"


def _end_text(line: RunLine) -> str:
    status = line.status
    if line.first_round:
        status += f" after round {line.round}"
    rounds = counted(line.round - line.first_round, "round")
    return " ".join(filter(None, (f"{status}, {rounds} in {minutes(line.seconds)}", line.company)))


def _round_text(line: RunLine) -> str:
    loss = "" if line.loss is None else f"loss {line.loss:.3f}"
    parts = [f"{line.label}: round {line.round}/{line.rounds}", loss]
    parts += [line.sentence, f"{line.traffic} MB up / down", line.clock]
    return ", ".join(filter(None, parts))


def _ends_a_tenth(line: RunLine) -> bool:
    return line.round * 10 // line.rounds > (line.round - 1) * 10 // line.rounds
