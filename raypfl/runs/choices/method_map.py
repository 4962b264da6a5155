"""The families of methods, and what each keeps, sends and needs, measured in rehearsed rounds of every method."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from raypfl.common.threads import threads
from raypfl.engine.prepared import Prepared
from raypfl.learning.objectives import Classification
from raypfl.methods import METHODS
from raypfl.runs.checks.rehearsal import Rehearsal
from raypfl.runs.choices.every_method import experiment_for_every_method, with_method

ROUNDS = 4
"""Rounds of a rehearsal: enough for methods whose second half differs, and for a window of three models."""

CLIENTS = 2

FAMILIES = {
    "global_model": "one model for all clients",
    "fair": "one model, fair to all clients",
    "partial_models": "a part of the model stays on the client",
    "personal_models": "a model for each client",
    "mixed_models": "a mixture of clients' models for each client",
    "clustered_models": "a model for each cluster of clients",
    "sub_networks": "a part of one model's units for each client",
    "lora": "low-rank adapters of one network",
}
"""Folders of `raypfl.methods`, in the order of the page."""

SAME = 0.015
"""Sizes that differ from a model's by less than this share of it count as a model: a loss may come with one."""


@dataclass(frozen=True)
class Needs:
    """What a method with its default options keeps, sends and needs.

    Attributes
    ----------
    state_size : numbers that a client keeps after the last rehearsed round, as a share of the network's.
    traffic : numbers that a client receives and sends in that round, as a share of twice the network's.
    exchanges : largest number of exchanges in a round.
    calls_everyone : whether a round also calls clients that were not drawn.
    """

    state_size: float
    traffic: float
    exchanges: int
    calls_everyone: bool


def needs_of(names: Iterable[str]) -> dict[str, Needs]:
    """Rehearse registered methods on digits, and return what each needs."""
    experiment = experiment_for_every_method(
        [
            "partition.clients=10",
            f"cohort.size={CLIENTS}",
            f"rounds={ROUNDS}",
            "model={name: mlp, hidden: [16]}",
            "engine.executor=vectorised",
        ]
    )
    data = experiment.load_data()
    size = Prepared(experiment.override(["method=fedavg"]), data).task.model.num_parameters

    with threads(experiment.engine.threads):
        return {name: _needs(Prepared(with_method(experiment, name), data), size) for name in names}


def _needs(prepared: Prepared, size: int) -> Needs:
    """Rehearse a method's rounds; `size` is the number of parameters of the network that the experiment names."""
    rehearsal = Rehearsal(prepared, CLIENTS)
    exchanges = [rehearsal.train() for _ in range(ROUNDS)]

    numbers = 0
    called: Counter[tuple[int, int, str, str]] = Counter()
    for message in rehearsal.messages:
        called[message.round, message.exchange, message.direction, message.name] += message.clients
        if message.round == ROUNDS:
            numbers += message.clients * message.numbers

    states = rehearsal.states().values()
    state_size = max(sum(tensor.numel() for tensor in state.values()) for state in states)
    return Needs(
        state_size=state_size / size,
        traffic=numbers / CLIENTS / (2 * size),
        exchanges=max(exchanges),
        calls_everyone=max(called.values(), default=0) > CLIENTS,
    )


def _compared(share: float) -> str:
    """Say how a share of the network's numbers compares with one network."""
    if share == 0:
        return "nothing"
    if share < 1 - SAME:
        return "less than a model"
    return "a model" if share <= 1 + SAME else "more than a model"


def markdown(needs_of_methods: Mapping[str, Needs]) -> str:
    """Return the map on the page of methods: families, and groups of methods with the same needs."""
    families: dict[str, list[str]] = {f"**{family}**": [] for family in FAMILIES.values()}
    sizes = ("nothing", "less than a model", "a model", "more than a model")
    groups: dict[str, list[str]] = {f"a client keeps {size}": [] for size in sizes}
    groups |= {f"a client receives and sends {size}, each way on average": [] for size in sizes}

    for name, needs in needs_of_methods.items():
        method = METHODS.get(name)()
        folder = method.__module__.split(".")[-2]
        families[f"**{FAMILIES[folder]}**"].append(name)
        groups[f"a client keeps {_compared(needs.state_size)}"].append(name)
        groups[f"a client receives and sends {_compared(needs.traffic)}, each way on average"].append(name)

        needed = {
            "several exchanges in a round": needs.exchanges > 1,
            "all clients at once, in some round": needs.calls_everyone,
            "validation samples of clients": method.needs_validation,
            "a pool of samples on the server": bool(method.needed_pools()),
            "low-rank adapters (`model.lora`)": method.needs_lora,
            "labels that are classes": method.objectives == (Classification,),
            "the server to make personal models": method.has("personalize"),
        }
        for need, is_needed in needed.items():
            groups.setdefault(f"needs {need}", [])
            if is_needed:
                groups[f"needs {need}"].append(name)

    lines = ["| | methods |", "|---|---|"]
    for label, names in (families | groups).items():
        lines.append(f"| {label} | {', '.join(f'`{name}`' for name in names)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(needs_of(METHODS)), end="")
