"""Locations in the user's code: where a function is defined, and which lines led to an error."""

from __future__ import annotations

import copy
import inspect
import linecache
import os
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NoReturn

from raypfl.common.errors import ConfigError, MethodError, RaypflError, UserCodeError

_LIBRARIES = (str(Path(__file__).parents[1]), *{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
_MAX_LINES = 24
_MAX_FRAMES = 10
_FILE = '  File "'


def where_defined(function: Callable[..., Any]) -> str:
    """Describe a function: ``"Mine.train (my_methods.py, line 12)"``."""
    name = getattr(function, "__qualname__", type(function).__name__).replace(".<locals>", "")
    code = getattr(function, "__code__", None)
    if code is None:
        return name
    # Not a Path, which is slower: this is called in every exchange.
    return f"{name} ({os.path.basename(code.co_filename)}, line {code.co_firstlineno})"


def refuse_result(function: Callable[..., Any], result: Any, must_return: str) -> NoReturn:
    """Raise a MethodError that says what a function returned, and what it must return."""
    shape = getattr(result, "shape", None)
    returned = f"a {type(result).__name__}" if shape is None else str(list(shape))
    raise MethodError(f"{where_defined(function)} returned {returned}; it must return {must_return}.")


def other_arguments(function: Callable[..., Any], names: Sequence[str]) -> str | None:
    """Say that a function takes other arguments than it is called with; None if they match."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # not written in Python
        return None
    try:
        signature.bind(*names)
    except TypeError:
        return (
            f"{where_defined(function)} is called with ({', '.join(names)}), but takes "
            f"({', '.join(signature.parameters)}); write {function.__name__}({', '.join(['self', *names])})."
        )
    return None


def traceback_text(error: BaseException) -> str:
    """Return the traceback of an error, reduced to the lines of user code; the full traceback if it has none."""
    user_lines = _user_lines(error)
    if user_lines or isinstance(error, SyntaxError):  # a syntax error's message has the line
        text = "".join(traceback.format_exception_only(error)).rstrip()
    else:
        text = "".join(traceback.format_exception(error)).rstrip()

    lines = [*user_lines.splitlines(), *text.splitlines()]
    if len(lines) > _MAX_LINES:
        lines = [*lines[:4], "  ...", *lines[5 - _MAX_LINES :]]
    return "\n".join(lines)


@contextmanager
def explain_user_errors(
    when: str = "", kind: type[RaypflError] = UserCodeError, function: Callable[..., Any] | None = None
) -> Iterator[None]:
    """While active, an error of user code becomes a sentence that names the function, the error and the lines.

    Errors of raypfl, which are sentences already, get the lines at most; those that no line of user code led to, which
    are bugs of raypfl, pass unchanged.

    Parameters
    ----------
    when : when the code was called, as ``"before round 1"``.
    kind : the class of the error to raise.
    function : the function that is called, which may fail before its first line, because it takes other arguments.

    Raises
    ------
    RaypflError : an error of this `kind`.
    """
    try:
        yield
    except (ConfigError, MethodError) as error:
        raise located(error) from error
    except RaypflError:
        raise
    except Exception as error:
        sentence = describe_failure(error, when, function)
        if sentence is None:
            raise
        raise kind(sentence) from None  # the sentence has the user's lines of the traceback


def describe_failure(error: BaseException, when: str = "", function: Callable[..., Any] | None = None) -> str | None:
    """Return ``"Mine.start (mine.py, line 12) failed: KeyError: 'x'"`` and the lines that led to an error.

    None if no user code led to it.
    """
    message = "".join(traceback.format_exception_only(error)).rstrip()
    failed = f"failed {when}" if when else "failed"

    location = user_location(error)
    if not location:
        if function is not None and isinstance(error, TypeError) and _is_user_function(function):
            return f"{where_defined(function)} {failed}: {message}"
        return None
    if location.startswith("<module>"):
        return None
    return f"{location} {failed}: {message}\n{_user_lines(error)}"


def user_location(error: BaseException) -> str:
    """Return the outermost of the user's functions that led to an error: ``"Mine.start (mine.py, line 12)"``.

    Empty if there is none.
    """
    for frame, line in traceback.walk_tb(error.__traceback__):
        if _is_user_frame(frame):
            return f"{_qualified(frame.f_code)} ({Path(frame.f_code.co_filename).name}, line {line})"
    return ""


def with_location(error: BaseException) -> str:
    """Return the message of an error, followed by the lines of user code unless it has them already."""
    message = str(error)
    user_lines = _user_lines(error)
    if not user_lines or _FILE in message:
        return message
    return f"{message}\n{user_lines}"


def located(error: RaypflError) -> RaypflError:
    """Return a copy of an error with the message of :func:`with_location`."""
    copied = copy.copy(error)
    copied.args = (with_location(error),)
    return copied


def _user_lines(error: BaseException) -> str:
    """Return the lines of user code that led to an error, outermost first; empty if there are none."""
    frames = traceback.walk_tb(error.__traceback__)
    lines = [_line(frame.f_code, number) for frame, number in frames if _is_user_frame(frame)]
    if len(lines) > _MAX_FRAMES:  # a recursion that does not end
        lines[4:-4] = [f"  ... {len(lines) - 8} more"]
    return "\n".join(lines)


def _is_user_frame(frame: FrameType) -> bool:
    return is_user_file(frame.f_code.co_filename)


def is_user_file(file: str) -> bool:
    """Return whether a file is the user's: neither raypfl's nor an installed package's."""
    return not file.startswith(("<frozen ", "<string>", *_LIBRARIES))


def _is_user_function(function: Callable[..., Any]) -> bool:
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return code is not None and is_user_file(code.co_filename)


def _qualified(code: CodeType) -> str:
    return code.co_qualname.replace(".<locals>", "")


def _line(code: CodeType, number: int) -> str:
    source = linecache.getline(code.co_filename, number).strip()
    text = f'{_FILE}{code.co_filename}", line {number}, in {_qualified(code)}'
    return f"{text}\n    {source}" if source else text
