"""What a run says of a method that fails on the server, or that returns or sends what it should not."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
from torch import Tensor

from raypfl.common.errors import CheckpointError, MethodError
from raypfl.common.user_code import describe_failure, traceback_text, where_defined
from raypfl.devices import Turn
from raypfl.engine.events import RoundFinished
from raypfl.engine.state.run_state import RunState
from raypfl.federation.cohort import Cohort, round_record
from raypfl.federation.cohort_draw import CohortDraw
from raypfl.federation.logged import Logged
from raypfl.federation.method import Method
from raypfl.storage.tree import as_saved, equal


def server_failure(
    method: Method,
    error: Exception,
    when: str,
    function: Callable[..., Any] | None,
    last_exchange: str = "",
    names: Collection[str] = (),
) -> str:
    """Describe an error that the method raised on the server: what failed and where.

    Parameters
    ----------
    when : when it failed, as ``"in round 3"``.
    function : the method's function that was called; None: one of several.
    last_exchange : a sentence with the shapes of the last exchange; may be empty.
    names : what the server's state had before the round.
    """
    failure = describe_failure(error, when, function)
    if failure is None:
        failure = f"{type(method).__name__} failed on the server {when}:\n{traceback_text(error)}"
    # Another dict may lack the name, where the lines of the failure do not even mention the server's.
    missing = _missing_state(error, names) if "server" in failure else ""
    lines = [failure, missing, last_exchange]
    return "\n".join(filter(None, lines))


def _missing_state(error: Exception, names: Collection[str]) -> str:
    """Return what the server's state has, if a name may have been looked up in it in vain; else an empty text."""
    if not isinstance(error, KeyError) or not error.args or not isinstance(error.args[0], str):
        return ""
    missing = error.args[0]
    if missing in names:
        return f"server[{missing!r}] was there before: server.pop and del remove it for all rounds to come."
    return f"The server's state has {', '.join(map(repr, sorted(names))) or 'nothing'}, as start returned it."


def gpu_advice(failure: str, run_dir: str) -> str:
    """Say what to do about a run in whose process the GPU can no longer be used.

    `failure` : the error that the GPU failed with, as :func:`raypfl.clients.gpu_errors.gpu_failure` returns it.
    """
    return (
        f"The GPU can no longer be used in this process ({failure}), so the run ends here. "
        f"{advice_of_failed_gpu(failure)} In a new process, `raypfl resume {run_dir}` continues from the last "
        "checkpoint, if there is one."
    )


def advice_of_failed_gpu(failure: str) -> str:
    """Say how the cause of a GPU's failure is found."""
    cause = ""
    if "device-side assert" in failure:
        cause = "A device-side assert often means a label or a token that is out of range. "
    return (
        f"{cause}GPUs report errors late: with the environment variable CUDA_LAUNCH_BLOCKING=1, the traceback ends at "
        "the operation that failed."
    )


def refuse_returned(function: Callable[..., Any], returned: object, state: object) -> None:
    """Raise a MethodError if a round returns anything, such as a coroutine or a new state: it would be lost."""
    if returned is not None and returned is not state:
        raise MethodError(
            f"{where_defined(function)} returned {_kind(returned)}; it must return nothing, and change "
            'the server\'s state in place, as in server["theta"] = ...'
        )


def refuse_start(function: Callable[..., Any], state: object) -> None:
    """Raise a MethodError if a method starts with anything but a dict."""
    if not isinstance(state, dict):
        raise MethodError(
            f"{where_defined(function)} returned {_kind(state)}; it must return the server's state, a dict "
            'such as {"theta": task.model.init(task.seed)}.'
        )


def saved_state(function: Callable[..., Any], state: dict[str, Any]) -> dict[str, Any]:
    """Return the server's state, which a method's function made, as a checkpoint would give it back.

    Raises
    ------
    MethodError : if a checkpoint cannot store it.
    """
    try:
        return as_saved(state)
    except CheckpointError as error:
        problem = str(error)
        raise MethodError(f"After {where_defined(function)}, {problem[0].lower()}{problem[1:]}") from None


def warning_of_other_messages(
    method: Method, turn: Turn | None, cohort: Cohort, cohort_draw: CohortDraw, finished: RoundFinished
) -> str | None:
    """Return a warning if a round's messages are not those of the rehearsal, or None.

    `turn` : the rehearsed turn of a client; None: nothing was rehearsed.
    """
    # Many methods send less in the first round.
    if turn is None or finished.round == 1 or not finished.clients:
        return None
    clients = np.array(cohort.ids)[cohort.present]
    sizes_in_round = method.message_sizes(cohort.task, finished.round)
    sizes = turn.message_sizes(clients) if sizes_in_round is None else sizes_in_round[clients]

    mean_size = float(np.mean(sizes))
    total_bytes = [finished.bytes_up]
    rehearsed_bytes = [turn.up_bytes]
    # Where clients are lost, or rounds are asynchronous, others than those that replied received messages, too.
    if not (cohort_draw.lost or cohort_draw.staleness or finished.failed):
        total_bytes.append(finished.bytes_down)
        rehearsed_bytes.append(turn.down_bytes)
    expected_bytes = mean_size * np.array(rehearsed_bytes)
    if np.allclose(np.array(total_bytes) / finished.clients, expected_bytes, rtol=0.01, atol=0):
        return None
    return (
        f"The messages of {type(method).__name__} differ in size from round to round. Simulated time and raypfl plan "
        f"assume those of the rehearsed round, {turn.up_bytes:,.0f} bytes up and {turn.down_bytes:,.0f} down a client; "
        "the ledger is right."
    )


def warning_of_first_round(
    method: Method, cohort: Cohort, server_before: dict[str, Any], state: RunState
) -> str | None:
    """Return a warning if the first round of a user's method left what its author cannot have meant, or None.

    `state` : the state after the round.
    """
    if type(method).__module__.startswith("raypfl.") or cohort.round > 1 or not cohort.num_exchanges:
        return None
    return _lost_work(method, cohort, server_before, state) or _sum_for_mean(cohort, server_before, state.server)


def _lost_work(method: Method, cohort: Cohort, server_before: dict[str, Any], state: RunState) -> str | None:
    """Return a warning if a round left nothing of what its clients did, or None."""
    _, logged = round_record(cohort)
    if logged != Logged() or len(state.clients) or not equal(server_before, state.server):
        return None
    return (
        f"Round 1 changed neither the server's state nor its clients', so what clients did in it is lost. Keep their "
        f'reply in {where_defined(method.round)}, as in server["theta"] = cohort.run(self.train, ...)["theta"], or '
        "what each client keeps in clients.state."
    )


def _sum_for_mean(cohort: Cohort, server_before: dict[str, Any], server: dict[str, Any]) -> str | None:
    """Return a warning if a tensor of the server grew as the sum of all clients' models would, or None."""
    num_clients = int(cohort.present.sum())
    for name, before in server_before.items():
        after = server.get(name)
        if not isinstance(before, Tensor) or not isinstance(after, Tensor) or before.shape != after.shape:
            continue

        # Training adds to a model but leaves about one of what it began with: in a sum of models, there are as many.
        start = before.double().flatten()
        times = float(after.double().flatten() @ start / (start @ start))
        if num_clients > 1 and abs(times - num_clients) < num_clients / 4:
            return (
                f'Round 1 made server["{name}"] about {num_clients} times as large, and {num_clients} clients took '
                "part. If the mean of their replies was meant, return Mean(...) from the clients' function, not "
                "Sum(...), which only adds them up."
            )
    return None


def _kind(value: object) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
