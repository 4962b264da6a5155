"""The picture of FL-NTK: predicted and observed errors, and the spectra of the kernels."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure
from torch import Tensor

BENEATH = {"color": "#F0C35A", "linewidth": 5}
"""Wide, because what is drawn above it is almost the same line."""


def draw(errors: Mapping[int, float], curves: Mapping[str, Tensor], finite: Tensor, infinite: Tensor) -> Figure:
    """Squared errors over rounds, observed and predicted; and eigenvalues of H(0) and H_inf, ascending.

    Parameters
    ----------
    errors : by round. curves : ``frozen``, ``infinite`` and ``bound``, ``[T + 1]`` each.
    """
    figure = Figure(figsize=(10, 4), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    first, rounds = float(curves["frozen"][0]), range(len(curves["frozen"]))
    for name, label, style in (
        ("bound", "FL-NTK's bound", {"color": "#999999", "linestyle": ":"}),
        ("infinite", "predicted, infinite width", BENEATH),
        ("frozen", "predicted, kernel at the start", {"color": "#0072B2"}),
    ):
        left.plot(rounds, curves[name].numpy() / first, label=label, **style)
    left.plot(list(errors), [e / first for e in errors.values()], ".", color="#D55E00", label="observed", markersize=6)
    left.set(yscale="log", xlabel="round", ylabel="squared error, relative to the first")
    left.legend(frameon=False)
    for values, label, style in ((infinite, "infinite width", BENEATH), (finite, "at the start", {"color": "#0072B2"})):
        right.plot(range(1, len(values) + 1), values.clamp_min(1e-16).numpy(), label=label, **style)
    right.set(yscale="log", xlabel="eigenvalue, ascending", title="Spectrum of the kernel")
    right.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#E4E4E4", linewidth=0.6)
    return figure
