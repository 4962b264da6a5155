"""Processes for tests, forked from one that has imported torch and raypfl, which takes a new process seconds.

They have this process's working folder and environment, but share neither its modules nor its threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
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


def _take_environment(variables: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)


def _call_in(variables: dict[str, str], function: Callable[..., Any], arguments: Any, options: Any) -> None:
    _take_environment(variables)
    function(*arguments, **options)
