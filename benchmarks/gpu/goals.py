"""What the first hour is to show."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.gpu.journal import Journal, Row

SMALL = ("mlp", "lenet")
"""Networks whose clients should train ten times as fast together as in a plain loop."""

FASTER = 10.0


def goals(journal: Journal) -> Iterator[str]:
    """Whether each goal is met, by the newest rows of each step."""
    compared = [row for row in journal.latest("check") if "right" in row]
    wrong = [_title(row) for row in compared if not row["right"]]
    yield _verdict("every network and optimizer computes what a CPU does", len(compared), wrong)

    repeated = [row for row in journal.latest("check") if "same_bits" in row]
    unstable = [_title(row) for row in repeated if not row["same_bits"]]
    yield _verdict("the same bits each time", len(repeated), unstable)

    best: dict[str, float] = {}
    for row in journal.latest("groups"):
        if "of_plain_PyTorch" in row:
            best[row["network"]] = max(row["of_plain_PyTorch"], best.get(row["network"], 0.0))
    for network in SMALL:
        goal = f"{network}: {FASTER:g} times a sequential loop of plain PyTorch"
        if network not in best:
            yield f"{goal}: not measured"
        else:
            verdict = "met" if best[network] >= FASTER else "NOT MET"
            yield f"{goal}: {verdict}, {best[network]:.1f} times"

    rates = {}
    for row in journal.latest("pfl"):
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

    shared = [row for row in journal.latest("bits") if "same_bits" in row]
    different = [str(row["processes"]) for row in shared if not row["same_bits"]]
    yield _verdict("the same hash for any number of processes", len(shared), different)


def _title(row: Row) -> str:
    names = [row[name] for name in ("network", "optimizer", "operation", "way") if name in row]
    return " ".join(names)


def _verdict(goal: str, count: int, failing: list[str]) -> str:
    """A goal that is met if none of `count` fails."""
    if not count:
        return f"{goal}: not measured"
    return f"{goal}: NOT MET by {'; '.join(failing)}" if failing else f"{goal}: met, {count} of {count}"
