"""Errors and warnings as sentences: what a command prints in place of a traceback."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from raypfl.common.errors import RaypflError, Refused, Stopped, Unwritable
from raypfl.common.user_code import explain_user_errors, is_user_file

EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_STOPPED = 130  # what a shell expects after Ctrl-C


class CommandsWithMessages(TyperGroup):
    """Commands whose errors and warnings are printed as sentences, without a traceback or a line of code."""

    def __init__(self, **attributes: Any):
        super().__init__(**attributes)
        for command in self.commands.values():
            # Typer keeps the ends of lines in all paragraphs but the first, whatever the terminal's width.
            command.help = re.sub(r"(?<!\n)\n(?!\n)", " ", command.help or "")

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that the words begin with; its name may be two words."""
        two_words = " ".join(args[:2])
        if two_words in self.commands:
            args = [two_words, *args[2:]]
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.showwarning = partial(_show_warning, warnings.showwarning, set())
                with explain_user_errors():
                    return super().invoke(ctx)
        except (Stopped, KeyboardInterrupt) as stop:
            print_message(str(stop) or "Stopped.", "yellow")
            raise typer.Exit(EXIT_STOPPED) from None
        except RaypflError as error:
            print_message(str(error), "red")
            exit_code = EXIT_REFUSED if isinstance(error, Refused) else EXIT_FAILED
            raise typer.Exit(exit_code) from None


def print_message(text: str, colour: str) -> None:
    """Print a message to stderr."""
    Console(stderr=True).print(Text(text, colour), soft_wrap=True)


@contextmanager
def printing(again: str) -> Iterator[None]:
    """Print a result, of which a reader that goes, as in ``raypfl run | head``, needs no more: the command goes on.

    Parameters
    ----------
    again : the command that prints the result again.

    Raises
    ------
    Unwritable : if stdout takes no more for another reason, such as a full disk.
    """
    try:
        yield
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit):  # rich's Console turns the first into the second
        # The end of the process writes what is left.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        raise Unwritable(f"The result cannot be printed: {error}. To print it again: {again}") from error


def _show_warning(
    show_as_python: Callable[..., None],
    shown_before: set[str],
    text: Warning,
    category: type[Warning],
    *location: Any,
) -> None:
    """Show a warning once: one for users as a sentence, one for developers as Python does, if their code gives it."""
    # Importing it takes seconds (torch, events, results), which --help and most commands need not wait for.
    from raypfl.results.display.console import warner

    if str(text) in shown_before:
        return
    shown_before.add(str(text))

    if not issubclass(category, UserWarning):
        if is_user_file(location[0]):
            show_as_python(text, category, *location)
        return
    console = Console(stderr=True)
    with console.capture() as captured:
        warner(console)(str(text))
    # Use stderr's console: a live table draws over what another console prints.
    sys.stderr.write(captured.get())
