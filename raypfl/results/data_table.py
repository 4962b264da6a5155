"""A federated data set on the terminal, and in the words of a program."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from raypfl.data.summary import Summary

_OF_CLIENTS = ("min", "median", "mean", "max")


def show(console: Console, summary: Summary) -> None:
    """Print what clients hold, split by split, how their labels differ, and the pools."""
    shape = "x".join(map(str, summary.input_shape))
    unseen = f", {len(summary.unseen)} of them never trained" if len(summary.unseen) else ""
    classes, kind = len(summary.class_names), summary.several
    console.print(
        Text.assemble((summary.name, "bold"), f": {shape}, {classes} {kind}, {summary.num_clients} clients{unseen}")
    )
    console.print(
        _table("samples of a client", {name: _spread(sizes) for name, sizes in summary.sizes.items()}, summary)
    )
    labels = {
        f"{kind} held": _spread(summary.classes_held),
        f"label entropy (bits, at most {math.log2(classes):.2f})": _spread(summary.entropy),
        "earth mover's distance to all clients' mix": _spread(summary.distance),
    }
    console.print(_table("training labels of a client", labels))
    for name, count in summary.pools.items():
        console.print(Text.assemble("pool ", (name, "bold"), f": {count:,} samples"))


def as_json(summary: Summary) -> dict[str, Any]:
    """The same as plain numbers."""
    return {
        "name": summary.name,
        "input_shape": list(summary.input_shape),
        "classes": summary.class_names,
        "clients": summary.num_clients,
        "unseen": summary.unseen.tolist(),
        "samples": {name: {"total": int(s.sum()), **_spread(s)} for name, s in summary.sizes.items()},
        "classes_held": _spread(summary.classes_held),
        "label_entropy_bits": _spread(summary.entropy),
        "earth_movers_distance": _spread(summary.distance),
        "pools": summary.pools,
    }


def _spread(values: np.ndarray) -> dict[str, float]:
    return {what: float(getattr(np, what)(values)) for what in _OF_CLIENTS}


def _table(title: str, rows: Mapping[str, Mapping[str, float]], summary: Summary | None = None) -> Table:
    """A row for each line of `rows`; with a `summary`, how many samples the split has in all."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(title)
    for what in _OF_CLIENTS:
        table.add_column(what, justify="right")
    if summary:
        table.add_column("all clients", justify="right")
    for name, spread in rows.items():
        total = [f"{summary.sizes[name].sum():,}"] if summary else []
        table.add_row(name, *(_number(value) for value in spread.values()), *total)
    return table


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) else f"{value:,.1f}" if value >= 100 else f"{value:.2f}"
