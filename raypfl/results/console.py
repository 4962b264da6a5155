"""Runs in progress on the terminal: a table that is redrawn, or lines now and then where there is no terminal."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from raypfl.results.outcome import nearby
from raypfl.results.progress import RunLine, minutes, serving
from raypfl.server.events import (
    Evaluated,
    Event,
    Listener,
    Progress,
    RoundFinished,
    RunFinished,
    RunStarted,
    ServerAtWork,
    Warned,
)

_MARKS = {
    "waiting": ("·", "dim"),
    "running": ("▸", "cyan"),
    "finished": ("✓", "green"),
    "stopped": ("■", "yellow"),
    "failed": ("✗", "red"),
}

_MOST_LINES = 16
_LONGEST_SILENCE = 30.0  # seconds, as far as rounds end in between


def warner(console: Console) -> Callable[[str], None]:
    """Shows a sentence as a warning, also while runs are shown."""
    return lambda text: console.print(f"[yellow]Warning:[/] {escape(text)}")


class View:
    """Shows warnings and nothing else; the views below show more. A context manager, entered before the first run.

    Parameters
    ----------
    console : where to show it.
    lines : one for each run, in the order in which they will go.
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
        return partial(self._hear, self.lines[index])

    def _hear(self, line: RunLine, event: Event) -> None:
        line(event)
        with contextlib.suppress(OSError):  # a terminal that is closed must not keep a run from being saved
            if isinstance(event, Warned):
                self.console.print(Text.assemble(("Warning: ", "bold yellow"), event.text))
            self.tell(line, event)

    def tell(self, line: RunLine, event: Event) -> None:
        """Show what happened to a run."""


class LiveView(View):
    """A table of the runs that is redrawn as they go, and what is going on below it.

    Of more runs than a terminal shows, it has those that are at work.
    """

    def __init__(self, console: Console, lines: Sequence[RunLine]):
        super().__init__(console, lines)
        self._spinner = Spinner("dots", style="cyan")
        self._doing = "starting Ray"
        self._serving = False
        self._live = Live(console=console, get_renderable=self.render, refresh_per_second=5)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._doing = ""
        self._live.stop()

    def tell(self, line: RunLine, event: Event) -> None:
        """Show what is going on now."""
        match event:
            case Progress():
                self._doing = event.text
            case RunStarted():
                self._doing = line.overview
            case ServerAtWork():
                self._doing, self._serving = serving(event), True
            case RoundFinished() if self._serving:
                self._doing, self._serving = line.overview, False
            case RunFinished():
                self._doing = ""

    def render(self) -> RenderableType:
        """The table as it stands."""
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
        table.add_column("")
        table.add_column("method", no_wrap=True)
        table.add_column("rounds")
        for heading in ("", "loss", _judged_by(self.lines), "MB up / down", "time"):
            table.add_column(heading, justify="right", no_wrap=True)
        shown = self.lines
        if len(self.lines) > _MOST_LINES:
            shown = [line for line in self.lines if line.status == "running"]
            ended = sum(line.status not in ("waiting", "running") for line in self.lines)
            table.title = f"{ended} of {len(self.lines)} runs have ended, {len(shown)} are at work"
        for line in shown:
            table.add_row(*_cells(line))
        if not self._doing:
            return table
        self._spinner.update(text=Text(self._doing, style="dim"))
        return Group(table, self._spinner)


class PlainView(View):
    """A line of text for about every tenth of a run, and after half a minute without one, for logs and pipes.

    Parameters
    ----------
    clock : seconds, from any beginning.
    """

    def __init__(self, console: Console, lines: Sequence[RunLine], clock: Callable[[], float] = time.monotonic):
        super().__init__(console, lines)
        self._held: dict[RunLine, str] = {}
        self._steps: set[str] = set()
        self._clock = clock
        self._printed = clock()

    def tell(self, line: RunLine, event: Event) -> None:
        """Print a line, if the event is worth one; a round's waits for its evaluation."""
        held = self._held.pop(line, "")
        if isinstance(event, Evaluated):
            self._held[line] = held and _round_text(line)
            return
        for text in (held, self._plain_text(line, event)):
            if text:
                self.console.print(text, soft_wrap=True, highlight=False, markup=False)
                self._printed = self._clock()
        if isinstance(event, RoundFinished) and (_ends_a_tenth(line) or self._silent_for_long()):
            self._held[line] = _round_text(line)

    def _silent_for_long(self) -> bool:
        return self._clock() - self._printed >= _LONGEST_SILENCE

    def _plain_text(self, line: RunLine, event: Event) -> str:
        match event:
            case Progress():  # told once, though a comparison prepares for all of its runs and then for each
                known = event.text in self._steps
                self._steps.add(event.text)
                return "" if known else event.text
            case ServerAtWork() if self._silent_for_long():
                return f"{line.label}: {serving(event)}"
            case RunStarted():
                return f"{line.label}: {line.overview}, in {nearby(Path(event.run_dir))}"
            case RunFinished():
                self._steps.clear()
                return ", ".join([f"{line.label}: {_end_text(line)}", *_reached(line)])
        return ""


def view(console: Console, lines: Sequence[RunLine], quiet: bool = False) -> View:
    """The view that suits the console."""
    kind = View if quiet else LiveView if console.is_terminal else PlainView
    return kind(console, lines)


def _cells(line: RunLine) -> list[RenderableType]:
    mark, style = _MARKS[line.status]
    bar = ProgressBar(max(line.rounds, 1), line.round, width=18, complete_style=line.colour, finished_style=line.colour)
    values = (
        f"{line.round}/{line.rounds}",
        "" if line.loss is None else f"{line.loss:.3f}",
        f"{line.reached} ({line.judged})" if line.judged else line.reached,
        line.traffic,
        f"{line.clock:>9}",
    )
    dim = "dim" if line.status == "waiting" else ""
    return [Text(mark, style), Text(line.label, dim or f"bold {line.colour}"), bar, *(Text(one, dim) for one in values)]


def _end_text(line: RunLine) -> str:
    rounds = line.round - line.first_round
    where = f" after round {line.round}" if line.first_round else ""
    return f"{line.status}{where}, {rounds} round{'' if rounds == 1 else 's'} in {minutes(line.seconds)} minutes"


def _round_text(line: RunLine) -> str:
    parts = [f"{line.label}: round {line.round}/{line.rounds}", f"loss {line.loss:.3f}"]
    parts += [*_reached(line), f"{line.traffic} MB up / down", line.clock]
    return ", ".join(part for part in parts if part)


def _judged_by(lines: Sequence[RunLine]) -> str:
    """The heading of what runs reached; a run's unit is known once it has started."""
    units = {line.unit for line in lines if line.status != "waiting"} or {line.unit for line in lines}
    if len(units) > 1:
        return "personal / global"
    (unit,) = units
    return f"personal / global{unit.sign}" if unit.sign else f"{unit.heading} personal / global"


def _reached(line: RunLine) -> list[str]:
    if not line.reached:
        return []
    when, what = f" ({line.judged})" if line.judged else "", "" if line.unit.sign else f"{line.unit.heading} "
    return [f"{what}personal / global {line.reached}{line.unit.sign}{when}"]


def _ends_a_tenth(line: RunLine) -> bool:
    return line.round * 10 // line.rounds > (line.round - 1) * 10 // line.rounds
