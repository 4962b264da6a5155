"""Settings of a round: who takes part, how clients are computed, what happens when one fails."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from raypfl.common.conditions import needs, unless


@dataclass(frozen=True, kw_only=True)
class CohortSettings:
    """Who takes part in a round.

    Attributes
    ----------
    size : clients drawn a round, uniformly without replacement; None: `fraction` of all.
    fraction : share of the clients drawn a round, if `size` is None, rounded up.
    dropout : chance that a drawn client receives the round's first message and then vanishes.
    availability : None, or ``{"low": p, "high": q}``: every client has a fixed chance in [p, q] to be reachable in a
        round.
    """

    size: int | None = None
    fraction: Annotated[float, unless("size")] = 1.0
    dropout: float = 0.0
    availability: dict[str, float] | None = None


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """How the work is executed. Group size and executor may change the last bits of a result; the rest does not.

    Attributes
    ----------
    backend : ``ray``, or ``inline`` (this process, no Ray: for a breakpoint, or a machine with torch alone).
    executor : ``vectorised`` (a group's clients at once, by vmap), ``sequential`` (one by one), ``auto`` (one of the
        two, by a rule on network, batch and group), or ``fastest`` (whichever is faster in a few timed steps as the run
        starts, so that bits may differ between runs). The run's ``metadata.json`` says which it was, and why.
    group_size : clients a group; None: from the cohort and the model. With 1, each client of a cohort has an actor of
        its own where there is room, for cross-silo studies.
    threads : torch threads per client actor, and inline.
    threads_for_server : torch threads of what the server computes itself; None: as many.
    """

    backend: Literal["ray", "inline"] = "ray"
    executor: Literal["auto", "fastest", "vectorised", "sequential"] = "auto"
    group_size: int | None = None
    threads: int = 1
    threads_for_server: int | None = None


@dataclass(frozen=True, kw_only=True)
class FailureSettings:
    """What happens when a client's own work fails.

    Attributes
    ----------
    on_client_failure : ``raise`` stops the run with a sentence; ``skip`` continues without the client and counts it.
    retries : further tries of a group after an error, before its failing clients are singled out by one try of each
        alone. A mistake in the method's code, such as a TypeError or KeyError, gets none: it would fail again.
    deaths : how often in a row the process of a group may die, while no group finishes anywhere, before its clients are
        singled out in the same way. Deaths are counted apart from errors, since preemption and other programs that
        fill the memory also kill processes.
    min_success_fraction : share of a cohort that must succeed, else the run stops even under ``skip``.
    loss_limit : a training loss above it, or one that is not finite, counts as a failure of that client.
    """

    on_client_failure: Literal["raise", "skip"] = "raise"
    retries: int = 2
    deaths: Annotated[int, needs("engine.backend", "ray")] = 5
    min_success_fraction: Annotated[float, needs("on_client_failure", "skip")] = 0.5
    loss_limit: float = 1e6
