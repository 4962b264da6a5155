"""What the first hour is to show."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.gpu.journal import Journal, Row

SMALL = ("mlp", "lenet")
"""Networks whose clients should train ten times as fast together as in a plain loop."""

FASTER = 10.0


def goals(journal: Journal, step: str) -> Iterator[str]:
    """Whether each goal of a step is met, by the step's newest rows."""
    return GOALS[step](journal.latest(step)) if step in GOALS else iter(())


def _of_check(rows: list[Row]) -> Iterator[str]:
    yield _right(rows, "every network and optimizer")
    repeated = [row for row in rows if "same_bits" in row]
    unstable = [_title(row) for row in repeated if not row["same_bits"]]
    yield _verdict("the same bits each time", len(repeated), unstable)


def _of_agreement(rows: list[Row]) -> Iterator[str]:
    yield _right(rows, "every method")


def _right(rows: list[Row], subjects: str) -> str:
    compared = [row for row in rows if "right" in row]
    wrong = [_title(row) for row in compared if not row["right"]]
    return _verdict(f"{subjects} computes what a CPU does", len(compared), wrong)


def _of_groups(rows: list[Row]) -> Iterator[str]:
    best: dict[str, float] = {}
    for row in rows:
        if "of_plain_PyTorch" in row:
            best[row["network"]] = max(row["of_plain_PyTorch"], best.get(row["network"], 0.0))
    for network in SMALL:
        goal = f"{network}: {FASTER:g} times a sequential loop of plain PyTorch"
        if network not in best:
            yield f"{goal}: not measured"
        else:
            verdict = "met" if best[network] >= FASTER else "NOT MET"
            yield f"{goal}: {verdict}, {best[network]:.1f} times"


def _of_pfl(rows: list[Row]) -> Iterator[str]:
    rates = {}
    for row in rows:
        if "clients_per_second" in row:
            rates[row["executor"], row["processes"]] = row["clients_per_second"]
    ours = {way: rate for way, rate in rates.items() if way[0] != "plain PyTorch"}
    plain = [rate for way, rate in rates.items() if way[0] == "plain PyTorch"]
    goal = "pfl-research's set-up: twice its clients a second"
    if not ours or not plain:
        yield f"{goal}: not measured"
    else:
        (executor, processes), rate = max(ours.items(), key=lambda item: item[1])
        yield (
            f"{goal}: to be compared with pfl-research on this card, which is not run here. raypfl: {rate:,.0f}, "
            f"{executor}, processes: {processes}; {rate / max(plain):.1f} times the best of the plain loop."
        )


def _of_bits(rows: list[Row]) -> Iterator[str]:
    shared = [row for row in rows if "same_bits" in row]
    different = [str(row["processes"]) for row in shared if not row["same_bits"]]
    yield _verdict("the same hash for any number of processes", len(shared), different)


GOALS: dict[str, Callable[[list[Row]], Iterator[str]]] = {
    "check": _of_check,
    "bits": _of_bits,
    "groups": _of_groups,
    "pfl": _of_pfl,
    "agreement": _of_agreement,
}
"""The goals of a step, from its rows."""


def _title(row: Row) -> str:
    names = [row[name] for name in ("about", "network", "optimizer", "method", "operation", "way") if name in row]
    return " ".join(names)


def _verdict(goal: str, count: int, failing: list[str]) -> str:
    """A goal that is met if none of `count` fails."""
    if not count:
        return f"{goal}: not measured"
    return f"{goal}: NOT MET by {'; '.join(failing)}" if failing else f"{goal}: met, {count} of {count}"
