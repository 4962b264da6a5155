"""Settings of a round: who takes part, how clients are computed, what happens when one fails."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from raypfl.common.conditions import Condition, needs, needs_some, unless
from raypfl.federation.selection import Selection


@dataclass(frozen=True, kw_only=True)
class CohortSettings:
    """Which clients take part in a round.

    Attributes
    ----------
    size : number of clients drawn per round, without replacement; None: `fraction` of all clients.
    fraction : share of the clients drawn per round, rounded up; used unless `size` is set.
    selection : how clients are chosen among those that can be reached, such as ``oort``, which prefers large losses and
        short turns; None: uniformly at random.
    over_selection : how many times as many clients are sent the first message; the round goes on with the first to
        finish, as many as without it. The others' work is lost.
    deadline : simulated seconds after which a round ends without the clients that are late; None: it waits for all.
    quorum : share of the cohort that must have finished for a round to end at the deadline; else it ends with the
        client that completes this share.
    late : what a client does that cannot finish by the deadline: ``drop`` its work, or send it ``partial``, after as
        many local steps as there is time for.
    """

    size: int | None = None
    fraction: Annotated[float, unless("size")] = 1.0
    selection: Annotated[Selection | None, unless("asynchronous.buffer")] = None
    over_selection: Annotated[float, needs("devices.hardware"), unless("asynchronous.buffer")] = 1.0
    deadline: Annotated[float | None, needs("devices.hardware"), unless("asynchronous.buffer")] = None
    quorum: Annotated[float, needs("deadline")] = 0.0
    late: Annotated[Literal["drop", "partial"], needs("deadline")] = "drop"


def needs_gpus_for_clients(otherwise: Condition | None = None) -> Condition:
    """Require client actors of some kind to have GPUs, or another condition."""
    return needs_some("ray.gpus_per_actor", otherwise=Condition("ray.pools", _has_gpus, "", otherwise))


def _has_gpus(pools: Sequence[Any]) -> bool:
    """Return whether a pool of client actors has GPUs; pools are described by mappings, or by objects."""
    settings = [pool if isinstance(pool, Mapping) else vars(pool) for pool in pools]
    return any(setting.get("gpus_per_actor", 0) != 0 for setting in settings)


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """How the work is executed. Group size and executor may change the last bits of a result; other settings do not.

    Attributes
    ----------
    backend : ``ray``, or ``inline`` for a single process without Ray (to debug, or where only torch is installed).
    executor : how a group's clients train: ``vectorised`` (all at once, by vmap), ``sequential`` (one by one), ``auto``
        (one of the two, by a rule on network, batch, group and device), or ``fastest`` (the faster one in a few steps
        timed at the start, so results may differ between runs in their last bits). The run's ``metadata.json`` records
        the choice and its reason.
    group_size : number of clients per group; None: chosen from the cohort and the model. With 1, each client of a
        cohort has its own actor if there is room, as in cross-silo studies.
    threads : number of torch threads per client actor, or of the process with ``backend: inline``.
    threads_for_server : number of torch threads for computations on the server; None: same as `threads`.
    cuda_graphs : whether clients that train at once on a GPU record a step as a CUDA graph and repeat it, in later
        rounds too. On an H200, 20 steps took a ninth to two thirds of the time, with the same bits.
    """

    backend: Literal["ray", "inline"] = "ray"
    executor: Literal["auto", "fastest", "vectorised", "sequential"] = "auto"
    group_size: int | None = None
    threads: int = 1
    threads_for_server: int | None = None
    cuda_graphs: Annotated[bool, needs("executor", "auto", "fastest", "vectorised"), needs_gpus_for_clients()] = True


@dataclass(frozen=True, kw_only=True)
class FailureSettings:
    """What happens when a client fails.

    Attributes
    ----------
    on_client_failure : ``raise`` stops the run with an error message; ``skip`` continues without the client and counts
        the failure.
    retries : number of times that a group is retried after an error, before each of its clients is tried once alone to
        find those that fail. Mistakes in the method's code, such as a TypeError or torch's error for wrong shapes, are
        not retried, since they would recur.
    deaths : number of times in a row that a group's process may die, or its GPU fail, while no group finishes anywhere,
        before each of its clients is tried alone. Deaths are counted apart from errors, since preemption and other
        programs that fill the memory also kill processes.
    min_success_fraction : smallest share of a cohort that must succeed; below it the run stops even with ``skip``: it
        has diverged if all failed clients have, else failed.
    loss_limit : largest training loss; a client fails if its loss is larger or not finite.
    """

    on_client_failure: Literal["raise", "skip"] = "raise"
    retries: int = 2
    deaths: Annotated[int, needs("engine.backend", "ray")] = 5
    min_success_fraction: Annotated[float, needs("on_client_failure", "skip")] = 0.5
    loss_limit: float = 1e6
