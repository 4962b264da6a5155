"""Processes for tests, forked from one that has imported torch and raypfl, which takes a new process seconds.

They have this process's working folder and environment, but share neither its modules nor its threads.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

FORKED = get_context("forkserver")
FORKED.set_forkserver_preload(["torch", "pytest", "raypfl.data.datasets", "raypfl.runs.driver"])


def processes(number: int) -> ProcessPoolExecutor:
    """Return a pool of processes that call functions of modules."""
    return ProcessPoolExecutor(number, FORKED, initializer=_take_environment, initargs=[dict(os.environ)])


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of a module in a process of its own, and return its result or raise its error."""
    with processes(1) as pool:
        return pool.submit(function, *arguments).result()


def exit_code(function: Callable[..., Any], *arguments: Any, **options: Any) -> int:
    """Call a function of a module in a process of its own.

    Returns
    -------
    Its exit code, or minus the signal that killed it.
    """
    process = FORKED.Process(target=_call_in, args=(dict(os.environ), function, arguments, options))
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def start_command(words: Sequence[str], log: Path) -> ForkServerProcess:
    """Start ``raypfl`` in a process of its own, which leads a process group; what it prints goes to `log`."""
    process = FORKED.Process(target=_call_in, args=(dict(os.environ), _carry_out, (words, log), {}))
    process.start()
    return process


def _carry_out(words: Sequence[str], log: Path) -> None:
    from raypfl.cli.app import main

    os.setsid()
    with log.open("w") as file:
        # Ray, too, writes to these, from C++.
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = ["raypfl", *words]
    main()


def _take_environment(variables: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)


def _call_in(variables: dict[str, str], function: Callable[..., Any], arguments: Any, options: Any) -> None:
    _take_environment(variables)
    function(*arguments, **options)
