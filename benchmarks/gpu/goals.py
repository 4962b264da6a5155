"""What the first hour is to show."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.gpu.journal import Journal

SMALL = ("mlp", "lenet")
"""Networks whose clients should train ten times as fast together as in a plain loop."""

FASTER = 10.0


def goals(journal: Journal) -> Iterator[str]:
    """Whether each goal is met, by the rows of the file."""
    best: dict[str, float] = {}
    for row in journal.rows("groups"):
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
    for row in journal.rows("pfl"):
        if "clients_per_second" in row:
            rates[row["executor"], row["processes"]] = row["clients_per_second"]
    ours = {way: rate for way, rate in rates.items() if way[0] != "plain PyTorch"}
    plain = [rate for way, rate in rates.items() if way[0] == "plain PyTorch"]
    goal = "pfl-research's set-up: twice its clients a second"
    if not ours:
        yield f"{goal}: not measured"
    else:
        (executor, processes), rate = max(ours.items(), key=lambda item: item[1])
        yield (
            f"{goal}: to be compared with pfl-research on this card, which is not run here. raypfl: {rate:,.0f}, "
            f"{executor}, processes: {processes}; {rate / max(plain):.1f} times the best of the plain loop."
        )

    compared = journal.rows("bits")
    wrong = [row for row in compared if not row.get("same_bits", True)]
    goal = "the same hash for any number of processes"
    if not compared:
        yield f"{goal}: not measured"
    else:
        numbers = ", ".join(str(row["processes"]) for row in compared if "same_bits" in row)
        verdict = "NOT MET" if wrong else "met"
        yield f"{goal}: {verdict}, with {numbers}"
