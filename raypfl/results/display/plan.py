"""A plan of a run in simulated time, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from raypfl.common.counting import counted
from raypfl.results.display.notices import plan_notices
from raypfl.runs.planning.plan import DAY, PERCENTILES, Plan


def as_json(plan: Plan) -> dict[str, Any]:
    """Return the plan in numbers."""
    numbers = {
        "rounds": plan.rounds,
        "clients": plan.num_clients,
        "rounds_a_day": plan.rounds_a_day,
        "simulated_seconds": plan.total_seconds,
        "round_seconds": _distribution(plan.seconds),
        "waiting_seconds": float(plan.begins[0] + (plan.begins[1:] - (plan.begins + plan.seconds)[:-1]).sum()),
        "clients_a_round": {name: float(getattr(plan, name).mean()) for name in ("clients", "dropped", "late")},
        "bytes_down": int(plan.bytes_down.sum()),
        "bytes_up": int(plan.bytes_up.sum()),
        "turn_bytes_down": plan.turn.down_bytes,
        "turn_bytes_up": plan.turn.up_bytes,
        "joules": float(plan.joules.sum()),
        # JSON has no NaN.
        "gini": None if np.isnan(plan.gini) else plan.gini,
        "never_drawn": int((~plan.drawn).sum()),
        "never_taken_part": int((plan.taken_part == 0).sum()),
        "notices": plan_notices(plan),
    }
    if plan.staleness is not None:
        numbers["staleness"] = {**_distribution(plan.staleness), "histogram": np.bincount(plan.staleness).tolist()}
    return numbers


def _distribution(values: np.ndarray) -> dict[str, float]:
    """Return the mean, percentiles and the largest of some numbers."""
    percentiles = {f"p{percent}": float(np.percentile(values, percent)) for percent in PERCENTILES}
    return {"mean": float(values.mean()), **percentiles, "max": float(values.max())}


def show(console: Console, plan: Plan) -> None:
    """Print the plan."""
    numbers = as_json(plan)
    seconds = numbers["round_seconds"]

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=False)
    table.add_column(style="dim")
    table.add_column()
    table.add_row("rounds a day", _three_digits(numbers["rounds_a_day"]))
    table.add_row("the whole run", f"{duration(plan.total_seconds)} for {counted(plan.rounds, 'round')}")
    table.add_row(
        "a round",
        f"{duration(seconds['mean'])} on average, {duration(seconds['p50'])} in the median, "
        f"{duration(seconds['p95'])} at the 95th percentile",
    )
    if numbers["waiting_seconds"]:
        table.add_row("waiting for clients", duration(numbers["waiting_seconds"]))
    table.add_row("clients of a round", _clients_of_a_round(numbers["clients_a_round"]))
    if plan.staleness is not None:
        staleness = numbers["staleness"]
        table.add_row(
            "staleness",
            f"{staleness['mean']:.2f} models on average, {staleness['p50']:.0f} in the median, "
            f"{staleness['p95']:.0f} at the 95th percentile, {staleness['max']:.0f} at most",
        )
    table.add_row("traffic", f"{size(numbers['bytes_down'])} down, {size(numbers['bytes_up'])} up")
    table.add_row("energy of the devices", energy(numbers["joules"]))
    table.add_row("taking part", _taking_part(numbers))
    console.print(table)
    for notice in numbers["notices"]:
        console.print(Text(notice, "bold yellow"))


def _clients_of_a_round(mean_counts: Mapping[str, float]) -> str:
    parts = [f"{mean_counts['clients']:,.1f} whose work counts"]
    if mean_counts["late"]:
        parts.append(f"{mean_counts['late']:,.1f} are late")
    if mean_counts["dropped"]:
        parts.append(f"{mean_counts['dropped']:,.1f} drop out")
    return ", ".join(parts)


def _taking_part(numbers: Mapping[str, Any]) -> str:
    never_drawn = numbers["never_drawn"]
    share = f"{numbers['clients'] - never_drawn:,} of" if never_drawn else "all"
    text = f"{share} {counted(numbers['clients'], 'client')} are drawn"

    never_counted = numbers["never_taken_part"] - never_drawn
    if never_counted:
        text += f", but the work of {never_counted:,} of them never counts"
    if numbers["gini"] is not None:
        text += f"; the Gini coefficient of their turns is {numbers['gini']:.2f}"
    return text


def _three_digits(number: float) -> str:
    """Return ``"0.0123"``, ``"12.3"`` or ``"12,300"``."""
    rounded = f"{number:.3g}"
    return rounded if number < 100 else f"{float(rounded):,.0f}"


def duration(seconds: float) -> str:
    """Return ``"12.3 s"``, ``"4.5 min"``, ``"6.7 h"`` or ``"8.9 days"``."""
    for limit, unit, name in ((120.0, 1.0, "s"), (7200.0, 60.0, "min"), (2 * DAY, 3600.0, "h")):
        if seconds < limit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds / DAY:,.1f} days"


def size(number: float) -> str:
    """Return bytes as ``"12.3 kB"``, ``"4.5 MB"``, ``"6.7 GB"`` or ``"8.9 TB"``."""
    for limit, unit, name in ((1e6, 1e3, "kB"), (1e9, 1e6, "MB"), (1e12, 1e9, "GB")):
        if number < limit:
            return f"{number / unit:.1f} {name}"
    return f"{number / 1e12:,.1f} TB"


def energy(joules: float) -> str:
    """Return ``"12 J"``, ``"3.4 kJ"`` or, from one kilowatt-hour on, ``"5.6 kWh"``."""
    if joules < 1e3:
        return f"{joules:.3g} J"
    if joules < 3.6e6:
        return f"{joules / 1e3:.1f} kJ"
    return f"{joules / 3.6e6:,.1f} kWh"
