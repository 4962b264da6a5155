"""The pictures of FL-NTK: errors, their terms, spectra; and rounds by the numbers of clients and of local steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from raypfl.analysis.theory.scaling import Scaling
from raypfl.analysis.theory.two_layer import Terms

BENEATH = {"color": "#F0C35A", "linewidth": 5}
"""Wide, because what is drawn above it is almost the same line."""

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")
MARKERS = ("o", "s", "^", "D", "v")
TERMS = {
    "descent": "descent",
    "unstable_kernel": "neurons that switch: kernel",
    "unstable_output": "neurons that switch: outputs",
    "second_order": "second order",
}


def draw(
    errors: Mapping[int, float],
    curves: Mapping[str, Tensor],
    terms: Mapping[int, Terms],
    finite: Tensor,
    infinite: Tensor,
) -> Figure:
    """Squared errors over rounds, observed and predicted; their four terms; and eigenvalues of H(0) and H_inf.

    Parameters
    ----------
    errors : by round. curves : ``frozen``, ``infinite`` and ``bound``, ``[T + 1]`` each.
    terms : by round, in shares of the squared error before the round.
    finite, infinite : eigenvalues, ascending, ``[n]``.
    """
    figure = Figure(figsize=(15, 4), dpi=120, layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=[3, 3, 2])
    first, rounds = float(curves["frozen"][0]), range(len(curves["frozen"]))
    for name, label, style in (
        ("bound", "FL-NTK's bound", {"color": "#999999", "linestyle": ":"}),
        ("infinite", "predicted, infinite width", BENEATH),
        ("frozen", "predicted, kernel at the start", {"color": "#0072B2"}),
    ):
        left.plot(rounds, curves[name].numpy() / first, label=label, **style)
    left.plot(list(errors), [e / first for e in errors.values()], ".", color="#D55E00", label="observed", markersize=6)
    left.set(yscale="log", xlabel="round", ylabel="squared error, relative to the first")
    left.set_title("Squared error")
    left.legend(frameon=False)
    _draw_terms(middle, terms)
    for values, label, style in ((infinite, "infinite width", BENEATH), (finite, "at the start", {"color": "#0072B2"})):
        right.plot(range(1, len(values) + 1), values.clamp_min(1e-16).numpy(), label=label, **style)
    right.set(yscale="log", xlabel="eigenvalue, ascending", title="Spectrum of the kernel")
    right.legend(frameon=False)
    _plain(left, middle, right)
    return figure


def _draw_terms(axes: Axes, terms: Mapping[int, Terms]) -> None:
    """Sizes of the four terms over rounds: filled where a term adds to the error, hollow where it takes from it."""
    for name, colour, marker in zip(TERMS, COLOURS, MARKERS, strict=False):
        values = {t: getattr(parts, name) for t, parts in terms.items() if getattr(parts, name)}
        axes.plot(list(values), [abs(value) for value in values.values()], color=colour, linewidth=0.8)
        for adds in (True, False):
            shown = {t: abs(value) for t, value in values.items() if (value > 0) == adds}
            fill = colour if adds else "white"
            axes.plot(list(shown), list(shown.values()), marker, color=colour, markerfacecolor=fill, markersize=5)
        axes.plot([], [], marker, color=colour, label=TERMS[name], linestyle="-", linewidth=0.8)
    axes.set(yscale="log", xlabel="round", ylabel="share of the squared error before the round")
    axes.set_title("Terms of its change (hollow: negative)")
    axes.legend(frameon=False, fontsize="small")


def draw_scaling(scaling: Scaling, share: float, clients: int, steps: int, observed: int | None) -> Figure:
    """Predicted rounds over the number of clients and over that of local steps, with the theorem's law dashed.

    Parameters
    ----------
    share : of the squared error, until which rounds are counted.
    clients, steps : of the run. observed : its rounds; None: the share was not reached.
    """
    figure = Figure(figsize=(10, 4), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    by_steps = list(zip(*scaling.rounds, strict=True))
    _draw_rounds(left, scaling.clients, by_steps, [_counted(k, "local step") for k in scaling.steps], power=1)
    _draw_rounds(right, scaling.steps, scaling.rounds, [_counted(n, "client") for n in scaling.clients], power=-1)
    for axes, x, name in ((left, clients, "clients"), (right, steps, "local steps a round")):
        if observed is not None:
            axes.plot([x], [observed], "*", color="#000000", markersize=12, label="this run, observed")
        axes.set(xlabel=name, ylabel=f"rounds until {100 * share:.3g}% of the squared error is left")
        axes.legend(frameon=False, fontsize="small")
    _plain(left, right)
    return figure


def _draw_rounds(
    axes: Axes, x: Sequence[int], lines: Sequence[Sequence[int | None]], labels: Sequence[str], power: int
) -> None:
    guide: list[float] = []
    for rounds, label, colour, marker in zip(lines, labels, COLOURS, MARKERS, strict=False):
        reached = {at: count for at, count in zip(x, rounds, strict=True) if count is not None}
        shown = label if reached else f"{label}: never"
        axes.plot(list(reached), list(reached.values()), color=colour, marker=marker, markersize=5, label=shown)
        if reached and not guide:
            at, count = next(iter(reached.items()))
            guide = [count * (value / at) ** power for value in x]
    if guide:
        law = "proportional to clients" if power > 0 else "proportional to 1 / steps"
        axes.plot(x, guide, color="#999999", linestyle="--", zorder=0, label=law)
    axes.set(xscale="log", yscale="log", xticks=list(x))
    axes.xaxis.set_major_formatter(ticker.ScalarFormatter())
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,g}"))


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _plain(*panels: Axes) -> None:
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#E4E4E4", linewidth=0.6)
