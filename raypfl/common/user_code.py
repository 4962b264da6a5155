"""Locations in user code: where a function is defined, and which lines led to an error."""

from __future__ import annotations

import hashlib
import inspect
import linecache
import os
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

_LIBRARIES = (str(Path(__file__).parents[1]), *{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
_MAX_LINES = 24
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


def with_location(error: BaseException) -> str:
    """The message of an error, followed by the lines of user code unless it has them already."""
    text, own = str(error), _user_lines(error)
    return text if not own or _FILE in text else f"{text}\n{own}"


def _user_lines(error: BaseException) -> str:
    """The lines of user code that led to an error, outermost first; empty if there are none."""
    frames = traceback.walk_tb(error.__traceback__)
    return "\n".join(_line(frame.f_code, number) for frame, number in frames if _is_user_code(frame.f_code.co_filename))


def _is_user_code(file: str) -> bool:
    return not file.startswith(("<frozen ", *_LIBRARIES))


def _line(code: CodeType, number: int) -> str:
    source = linecache.getline(code.co_filename, number).strip()
    text = f'{_FILE}{code.co_filename}", line {number}, in {code.co_qualname.replace(".<locals>", "")}'
    return f"{text}\n    {source}" if source else text
