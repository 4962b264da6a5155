"""Locations in user code: where a function is defined, and which lines led to an error."""

from __future__ import annotations

import hashlib
import inspect
import linecache
import os
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from raypfl.common.errors import RaypflError, UserCodeError

_LIBRARIES = (str(Path(__file__).parents[1]), *{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
_MAX_LINES = 24
_MAX_FRAMES = 10
_FILE = '  File "'


def where_defined(function: Callable[..., Any]) -> str:
    """``"Mine.train (my_methods.py, line 12)"``."""
    code = getattr(function, "__code__", None)
    name = getattr(function, "__qualname__", type(function).__name__)
    return name + (f" ({Path(code.co_filename).name}, line {code.co_firstlineno})" if code else "")


def source_digest(component: Any) -> str:
    """A hash of the file that defines a class or function, for keys of caches of what it makes."""
    try:
        return hashlib.sha256(Path(inspect.getfile(component)).read_bytes()).hexdigest()
    except (TypeError, OSError):
        return os.urandom(16).hex()  # typed into a console: it may have changed


def traceback_text(error: BaseException) -> str:
    """The traceback of an error, reduced to the lines of user code; the full traceback if it has none."""
    own = _user_lines(error)
    text = "".join(
        traceback.format_exception_only(error)
        if own or isinstance(error, SyntaxError)
        else traceback.format_exception(error)
    ).rstrip()
    shown = [*own.splitlines(), *text.splitlines()]
    return "\n".join(shown if len(shown) <= _MAX_LINES else [*shown[:4], "  ...", *shown[5 - _MAX_LINES :]])


@contextmanager
def framed(
    when: str = "", kind: type[RaypflError] = UserCodeError, function: Callable[..., Any] | None = None
) -> Iterator[None]:
    """Within: what the user's own code raises becomes a sentence that names the function, the error and the lines.

    Errors of raypfl, which are sentences already, and those that no line of the user's led to, which are bugs of
    raypfl, pass unchanged.

    Parameters
    ----------
    when : what was done, as ``"before round 1"``.
    function : what is called, which may fail before its first line, because it takes other arguments.

    Raises
    ------
    RaypflError : of this `kind`.
    """
    try:
        yield
    except RaypflError:
        raise
    except Exception as error:
        if (sentence := failure_of(error, when, function)) is None:
            raise
        raise kind(sentence) from None  # the sentence has all lines of the traceback that are the user's


def failure_of(error: BaseException, when: str = "", function: Callable[..., Any] | None = None) -> str | None:
    """``"Mine.start (mine.py, line 12) failed: KeyError: 'x'"`` and the lines; None if no user code led to it."""
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if _is_user_frame(frame)]
    said = "".join(traceback.format_exception_only(error)).rstrip()
    if not frames and function is not None and isinstance(error, TypeError) and _is_of_user(function):
        return f"{' '.join(filter(None, [where_defined(function), 'failed', when]))}: {said}"
    if not frames:
        return None
    frame, line = frames[0]
    name = _qualified(frame.f_code)
    if name == "<module>":
        return None
    where = f"{name} ({Path(frame.f_code.co_filename).name}, line {line})"
    return f"{' '.join(filter(None, [where, 'failed', when]))}: {said}\n{_user_lines(error)}"


def with_location(error: BaseException) -> str:
    """The message of an error, followed by the lines of user code unless it has them already."""
    text, own = str(error), _user_lines(error)
    return text if not own or _FILE in text else f"{text}\n{own}"


def _user_lines(error: BaseException) -> str:
    """The lines of user code that led to an error, outermost first; empty if there are none."""
    frames = traceback.walk_tb(error.__traceback__)
    lines = [_line(frame.f_code, number) for frame, number in frames if _is_user_frame(frame)]
    if len(lines) > _MAX_FRAMES:  # a recursion that does not end
        lines[4:-4] = [f"  ... {len(lines) - 8} more"]
    return "\n".join(lines)


def _is_user_frame(frame: FrameType) -> bool:
    """Whether a frame is of a file that neither raypfl nor an installed package has."""
    return _is_user_file(frame.f_code.co_filename)


def _is_user_file(file: str) -> bool:
    return not file.startswith(("<frozen ", "<string>", *_LIBRARIES))


def _is_of_user(function: Callable[..., Any]) -> bool:
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return code is not None and _is_user_file(code.co_filename)


def _qualified(code: CodeType) -> str:
    return code.co_qualname.replace(".<locals>", "")


def _line(code: CodeType, number: int) -> str:
    source = linecache.getline(code.co_filename, number).strip()
    text = f'{_FILE}{code.co_filename}", line {number}, in {_qualified(code)}'
    return f"{text}\n    {source}" if source else text
