"""CPU time of a round, by what it is spent on: training, and all that the server does around it.

    python -m benchmarks.rounds                      # 2,000 rounds of FedAvg with ten clients, half a minute
    python -m benchmarks.rounds --method ditto --rounds 500

One process, the digits of 100 clients, a network of 9,610 parameters and five steps of ten samples; evaluations and
checkpoints come as often as by default. Each moment counts for one part only, the innermost that has begun. The first
rounds, which warm up, do not count. To compare two versions, let them take turns: `PYTHONPATH=OTHER_CHECKOUT`.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import raypfl
from benchmarks.circumstances import about
from benchmarks.digits import experiment
from raypfl.clients import clients
from raypfl.clients.group import ClientGroup
from raypfl.clients.worker import Worker
from raypfl.engine.dispatcher import EventDispatcher
from raypfl.engine.events import Event, RoundFinished
from raypfl.engine.server import Server
from raypfl.engine.state.run_checkpoints import RunCheckpoints
from raypfl.engine.state.run_tables import RunTables
from raypfl.federation.cohort import Cohort
from raypfl.federation.exchange.group_runner import GroupRunner
from raypfl.federation.ledger import Ledger
from raypfl.federation.rounds import SynchronousRounds
from raypfl.learning.executor import Executor
from raypfl.learning.vectorised import Vectorised

WARM_UP = 20
TRAINING = "local steps"

PARTS: Mapping[str, Sequence[tuple[Any, str]]] = {
    TRAINING: [(Vectorised, "sgd"), (Executor, "sgd")],
    "keys, samples and their order": [(clients, "prepare_training"), (ClientGroup, "samples")],
    "the rest of a group's work": [(Worker, "work")],
    "draw of the cohort": [(SynchronousRounds, "draw")],
    "groups and broadcasts": [(GroupRunner, "prepare")],
    "ledger": [(Cohort, "_charge_down"), (Cohort, "_charge"), (Ledger, "add"), (Ledger, "total")],
    "tables and events": [(RunTables, "add_round"), (EventDispatcher, "__call__")],
    "the rest of an exchange": [(Cohort, "run")],
    "the rest of a round": [(Server, "_run_round")],
}
"""Part -> the functions that it consists of, each with its class or module, except for parts within them."""

WHOLE: Mapping[str, Sequence[tuple[Any, str]]] = {
    "evaluation, every fifth round": [(Server, "_evaluate")],
    "checkpoints, every two seconds": [(RunCheckpoints, "save")],
}
"""Parts that include what they call."""

REST = "between rounds"


class Clock:
    """Adds up the CPU time of parts.

    Attributes
    ----------
    seconds : part -> seconds of CPU time since the last :meth:`restart`.
    """

    def __init__(self) -> None:
        self._parts = [REST]
        self._is_whole = False
        self.restart()

    def restart(self) -> None:
        """Begin to count."""
        self.seconds: Counter[str] = Counter()
        self._since = time.process_time()

    def timed(self, part: str, function: Callable[..., Any], is_whole: bool) -> Callable[..., Any]:
        """Return the function, whose time counts for a part."""

        @functools.wraps(function)
        def counted(*arguments: Any, **options: Any) -> Any:
            if self._is_whole:
                return function(*arguments, **options)
            self._switch()
            self._parts.append(part)
            self._is_whole = is_whole
            try:
                return function(*arguments, **options)
            finally:
                self._switch()
                self._parts.pop()
                self._is_whole = False

        return counted

    def _switch(self) -> None:
        now = time.process_time()
        self.seconds[self._parts[-1]] += now - self._since
        self._since = now


def install(clock: Clock) -> None:
    """Let a clock count the parts of all rounds from now on."""
    for parts, is_whole in ((PARTS, False), (WHOLE, True)):
        for part, functions in parts.items():
            for owner, name in functions:
                setattr(owner, name, clock.timed(part, getattr(owner, name), is_whole))


def milliseconds(folder: str, method: str, rounds: int, cohort: int) -> tuple[Counter[str], str]:
    """Milliseconds of CPU time a round by part, and the hash of the models at the end."""
    clock = Clock()
    install(clock)
    parts: Counter[str] = Counter()

    def note(event: Event) -> None:
        if isinstance(event, RoundFinished) and event.round == WARM_UP:
            clock.restart()
        if isinstance(event, RoundFinished) and event.round == rounds:
            parts.update(clock.seconds)

    described = experiment(folder, cohort, steps=5, rounds=rounds, method=method)
    result = raypfl.run(described, listeners=[note])
    counted = rounds - WARM_UP
    return Counter({part: 1000 * seconds / counted for part, seconds in parts.items()}), result.weights_hash


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rounds", description=__doc__.partition("\n")[0])
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--cohort", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)

    print(about())
    with tempfile.TemporaryDirectory() as folder:
        parts, weights_hash = milliseconds(folder, options.method, options.rounds, options.cohort)
    print(f"{options.method}, {options.cohort} clients a round: ms of CPU time, mean of {options.rounds} rounds")
    for part in (*PARTS, *WHOLE, REST):
        print(f"  {part:32}{parts[part]:8.3f}")
    print(f"  {'all but the local steps':32}{parts.total() - parts[TRAINING]:8.3f}")
    print(f"  {'all':32}{parts.total():8.3f}")
    print(f"  {weights_hash}")


if __name__ == "__main__":
    main()
