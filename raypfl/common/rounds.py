"""Whether something that recurs, such as an evaluation, is due after a round."""

from __future__ import annotations


def is_due(round: int, every: int, rounds: int) -> bool:
    """Return whether an event is due after this round: every `every` rounds, and after the last one."""
    return round == rounds or (every > 0 and round % every == 0)
