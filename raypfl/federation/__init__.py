"""The engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raypfl.federation.driver import check as check
    from raypfl.federation.driver import resume as resume
    from raypfl.federation.driver import run as run
    from raypfl.federation.driver import session as session
    from raypfl.federation.result import Result as Result

__all__ = ["Result", "check", "resume", "run", "session"]


def __getattr__(name: str) -> Any:
    # What a run needs beyond torch and NumPy is imported only when something is run.
    if name in ("check", "run", "resume", "session"):
        from raypfl.federation import driver

        return getattr(driver, name)
    if name == "Result":
        from raypfl.federation.result import Result

        return Result
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
