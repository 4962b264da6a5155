"""Errors: each message says what is wrong, where, and how to fix it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable


class RaypflError(Exception):
    """Base of the errors that raypfl raises; the message is written for the person who can fix it."""


class Refused(RaypflError):
    """Settings or data do not allow what is asked for: a command exits with 2, where other failures end it with 1."""


class ConfigError(Refused):
    """An experiment asks for something that does not exist, or contradicts itself."""


class DataError(Refused):
    """A data set cannot be read, or cannot be partitioned, as described."""


class MethodError(RaypflError, ValueError):
    """A method's code uses raypfl in a wrong way."""


class IncompleteError(MethodError, NotImplementedError):
    """A class of the user's own lacks a function that it must define."""


class UserCodeError(Refused):
    """A function of the user's own failed before the first round; nothing is left of the run."""


class ListenerError(RaypflError):
    """A listener failed, so that the run ends."""


class PrivacyError(MethodError):
    """A method needs what the privacy settings do not let it have."""


class CheckpointError(RaypflError):
    """A checkpoint is missing, damaged, or belongs to another experiment."""


class NoRun(CheckpointError, Refused):
    """A folder that is named has no run, or none of the kind that is needed."""


class Unwritable(RaypflError):
    """A file of a run's folder cannot be written: the disk is full, or permissions are missing."""


class ClientError(RaypflError):
    """A client's work failed.

    Parameters
    ----------
    message : what happened, as a sentence.
    clients : ids of the clients that failed.
    repeatable : whether another try would fail too (a NaN loss), so that there is none.
    """

    def __init__(self, message: str, clients: Iterable[int] = (), repeatable: bool = False):
        super().__init__(message, tuple(clients), repeatable)
        self.message = message
        self.clients = tuple(clients)
        self.repeatable = repeatable

    def __str__(self) -> str:
        return self.message


class EmptyCohort(RaypflError):
    """No client is left in a round."""


class OutOfMemory(RaypflError):
    """A GPU's memory is too small for a group of clients."""


class LostState(RaypflError):
    """Client states were lost with the node that held them; the rounds since the last checkpoint must be run again."""


class Stopped(RaypflError):
    """The run was asked to stop (Ctrl-C, SIGTERM), and stops before the next result."""


_ABBREVIATED = {"learning_rate": "lr"}


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``"did you mean 'x'?"`` for the nearest known name, else the list of the known ones."""
    known = sorted(known)
    meant = {full: short for full, short in _ABBREVIATED.items() if short in known} | {one: one for one in known}
    by_letters = {_letters(full): short for full, short in meant.items()}
    near = [by_letters[close] for close in difflib.get_close_matches(_letters(name), by_letters, n=1, cutoff=0.5)]
    more = f" and {len(known) - 50} more" if len(known) > 50 else ""
    return f"did you mean {near[0]!r}?" if near else f"known are: {', '.join(known[:50])}{more}."


def _letters(name: str) -> str:
    """A name without regard to case and punctuation: ``CIFAR-10`` is ``cifar10``."""
    return re.sub(r"[\W_]+", "", name.casefold())


def known_pool(name: str, pools: Collection[str]) -> str:
    """Returns `name`.

    Raises
    ------
    ConfigError : if there is no such pool.
    """
    if name not in pools:
        hint = did_you_mean(name, pools) if pools else "data.pools has none."
        raise ConfigError(
            f"There is no pool called {name!r}; {hint} One that takes a tenth of the training samples is described as "
            f"data.pools={{{name}: 0.1}}."
        )
    return name
