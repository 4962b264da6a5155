"""Runs: start, resume and stop them, and read what they left behind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raypfl.runs.driver import check as check
    from raypfl.runs.driver import resume as resume
    from raypfl.runs.driver import run as run
    from raypfl.runs.driver import session as session
    from raypfl.runs.result import Result as Result

__all__ = ["Result", "check", "resume", "run", "session"]


def __getattr__(name: str) -> Any:
    # Loaded on first use: what a run needs beyond torch and NumPy takes seconds to import.
    if name in ("check", "run", "resume", "session"):
        from raypfl.runs import driver

        return getattr(driver, name)
    if name == "Result":
        from raypfl.runs.result import Result

        return Result
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
