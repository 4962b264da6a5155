"""Errors: each message says what is wrong, where, and how to fix it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable
from textwrap import indent


class RaypflError(Exception):
    """Base class of raypfl's errors; the message is written for the person who can fix it."""


class Refused(RaypflError):
    """Error for settings or data that do not allow what is asked for: a command exits with 2 instead of 1."""


class ConfigError(Refused):
    """Error for an experiment that asks for something that does not exist, or contradicts itself."""


class DataError(Refused):
    """Error for a data set that cannot be read, or cannot be partitioned, as described."""


class MethodError(RaypflError, ValueError):
    """Error for a method's code that uses raypfl in a wrong way."""


class IncompleteError(MethodError, NotImplementedError):
    """Error for a user's class without a function that it must define."""


class UserCodeError(Refused):
    """Error for a user's function that failed while a run was prepared; the run leaves nothing behind."""


class ListenerError(RaypflError):
    """Error for a listener that failed; it ends the run."""


class LateReplyError(MethodError):
    """Error for a method whose rounds cannot be asynchronous, because late replies would be meaningless.

    Parameters
    ----------
    message : what is wrong, as a sentence.
    reason : the same in a few words, for a list of methods.
    """

    def __init__(self, message: str, reason: str | None = None):
        # A copy and pickle pass the whole message alone, and set the reason afterwards.
        if reason is not None:
            message = (
                f"{message} A method of your own needs one exchange a round, in which each reply is the Mean of an "
                "argument of its name after training, or Sum(rows, counts_late=True); or choose another method "
                "(`raypfl list asynchronous`), or leave asynchronous.buffer out."
            )
        super().__init__(message)
        self.reason = reason


class EvaluationError(MethodError):
    """Error in an evaluation: a method makes no models of the network or changes a state, or a metric does not fit."""


class PrivacyError(MethodError):
    """Error for a method that needs data which the privacy settings protect."""


class AggregationError(MethodError):
    """Error for a method whose messages the rule in ``aggregation`` cannot aggregate."""


class CheckpointError(RaypflError):
    """Error for a checkpoint that is missing, damaged, or another experiment's."""


class NoRun(CheckpointError, Refused):
    """Error for a folder without a run, or without one of the kind that a command needs."""


class Unwritable(RaypflError):
    """Error for a file that cannot be written: the disk is full, for example, or permissions are missing."""


class RayDied(RaypflError):
    """Error for a local Ray cluster whose processes have died; whatever runs on it next would fail too."""


class ClientError(RaypflError):
    """Error for clients whose work failed.

    Parameters
    ----------
    message : what happened, as a sentence.
    clients : numbers of the clients that failed.
    repeatable : whether another try would fail too, as after a NaN loss; the work is then not tried again.
    """

    def __init__(self, message: str, clients: Iterable[int] = (), repeatable: bool = False):
        super().__init__(message, tuple(clients), repeatable)
        self.message = message
        self.clients = tuple(clients)
        self.repeatable = repeatable

    def __str__(self) -> str:
        return self.message


class Diverged(ClientError):
    """Error for training whose loss or model is not finite, or whose loss is above ``failures.loss_limit``."""


class EmptyCohort(RaypflError):
    """Error for a round in which no client is left."""


class OutOfMemory(RaypflError):
    """Error for a GPU whose memory is too small for a group of clients."""


class LostState(RaypflError):
    """Error for client states lost with their node; the rounds since the last checkpoint must be run again."""


class Stopped(RaypflError):
    """Error that ends a run that was asked to stop (Ctrl-C, SIGTERM), before the next result."""


_ABBREVIATIONS = {"learning_rate": "lr"}
"""Names that users know from elsewhere -> ours, where the spelling is too different for a match."""


def did_you_mean(name: str, candidates: Iterable[str], prefix: str = "") -> str:
    """Return ``"did you mean 'x'?"`` for the nearest candidate, or a list of all if none is near.

    `prefix` : what stands before the nearest candidate, such as ``"training."``.
    """
    candidates = sorted(candidates)
    if not candidates:
        return "there is none to choose from."
    near = nearest(name, candidates)
    return f"choose one of: {listed(candidates)}." if near is None else f"did you mean {prefix + near!r}?"


def nearest(name: str, candidates: Collection[str]) -> str | None:
    """Return the candidate that a name was meant for; None if none is near."""
    by_letters = {_letters(word): setting for word, setting in _ABBREVIATIONS.items() if setting in candidates}
    by_letters |= {_letters(candidate): candidate for candidate in candidates}
    matches = difflib.get_close_matches(_letters(name), by_letters, n=1, cutoff=0.5)
    return by_letters[matches[0]] if matches else None


def listed(names: Iterable[object], most: int = 80) -> str:
    """Return names separated by commas; beyond the first `most`, only how many more there are."""
    texts = list(map(str, names))
    text = ", ".join(texts[:most])
    if len(texts) > most:
        text += f" and {len(texts) - most:,} more"
    return text


def one_message(lines: list[str], subject: str) -> str:
    """Return a single mistake unchanged, and several as a list, in which the lines of a traceback are indented."""
    if len(lines) == 1:
        return lines[0]
    items = [indent(line, "    ").lstrip() for line in lines]
    return "\n  - ".join([f"{subject} has {len(lines)} mistakes:", *items])


def _letters(name: str) -> str:
    """Return a name without case and punctuation: ``CIFAR-10`` is ``cifar10``."""
    return re.sub(r"[\W_]+", "", name.casefold())
