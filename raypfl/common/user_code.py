"""Where in a person's own code something is, or went wrong."""

from __future__ import annotations

import linecache
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

_LIBRARIES = (str(Path(__file__).parent), *{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
_MOST = 24  # lines of a traceback
_FILE = '  File "'


def place(function: Callable[..., Any]) -> str:
    """``"Mine.train (my_methods.py, line 12)"``."""
    code = getattr(function, "__code__", None)
    name = getattr(function, "__qualname__", type(function).__name__)
    return name + (f" ({Path(code.co_filename).name}, line {code.co_firstlineno})" if code else "")


def lines(error: BaseException) -> str:
    """The lines of the author's own files that led to an error, outermost first; empty if there are none."""
    walked = traceback.walk_tb(error.__traceback__)
    return "\n".join(_line(frame.f_code, number) for frame, number in walked if _is_own(frame.f_code.co_filename))


def told(error: BaseException) -> str:
    """An error under the author's own lines alone; under all lines if none is the author's."""
    own = lines(error)
    text = "".join(
        traceback.format_exception_only(error)
        if own or isinstance(error, SyntaxError)
        else traceback.format_exception(error)
    ).rstrip()
    shown = [*own.splitlines(), *text.splitlines()]
    return "\n".join(shown if len(shown) <= _MOST else [*shown[:4], "  ...", *shown[5 - _MOST :]])


def located(error: BaseException) -> str:
    """An error's text, with the author's own lines below unless they are in it already."""
    text, own = str(error), lines(error)
    return text if not own or _FILE in text else f"{text}\n{own}"


def _is_own(file: str) -> bool:
    return not file.startswith(("<frozen ", *_LIBRARIES))


def _line(code: CodeType, number: int) -> str:
    source = linecache.getline(code.co_filename, number).strip()
    text = f'{_FILE}{code.co_filename}", line {number}, in {code.co_qualname.replace(".<locals>", "")}'
    return f"{text}\n    {source}" if source else text
