"""The pictures of FL-NTK: errors, their terms, spectra; and rounds by the numbers of clients and of local steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from raypfl.analysis.theory.scaling import Scaling
from raypfl.analysis.theory.two_layer import Terms
from raypfl.common.counting import counted

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")
MARKERS = ("o", "s", "^", "D", "v")

BOUND_STYLE: dict[str, Any] = {"color": "#999999", "linestyle": ":"}
FINITE_STYLE: dict[str, Any] = {"color": "#0072B2"}

INFINITE_STYLE: dict[str, Any] = {"color": "#F0C35A", "linewidth": 5}
"""Wide, because the line that is drawn on top of it is almost the same."""

TERM_LABELS = {
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
    """Draw the squared errors, observed and predicted; their four terms; and the eigenvalues of H(0) and H_inf.

    Parameters
    ----------
    errors : round -> observed squared error.
    curves : predicted squared errors by round, ``[T + 1]`` each, under ``frozen``, ``infinite`` and ``bound``.
    terms : round -> terms of the error's change, in shares of the squared error before the round.
    finite, infinite : eigenvalues, ascending, ``[n]``.
    """
    figure = Figure(figsize=(15, 4), dpi=120, layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=[3, 3, 2])
    _draw_errors(left, errors, curves)
    _draw_terms(middle, terms)
    _draw_spectra(right, finite, infinite)
    _remove_clutter(left, middle, right)
    return figure


def _draw_errors(axes: Axes, errors: Mapping[int, float], curves: Mapping[str, Tensor]) -> None:
    first_error = float(curves["frozen"][0])
    rounds = range(len(curves["frozen"]))
    for name, label, style in (
        ("bound", "FL-NTK's bound", BOUND_STYLE),
        ("infinite", "predicted, infinite width", INFINITE_STYLE),
        ("frozen", "predicted, kernel at the start", FINITE_STYLE),
    ):
        axes.plot(rounds, curves[name].numpy() / first_error, label=label, **style)

    observed = [error / first_error for error in errors.values()]
    axes.plot(list(errors), observed, ".", color="#D55E00", label="observed", markersize=6)
    axes.set(yscale="log", xlabel="round", ylabel="squared error, relative to the first")
    axes.set_title("Squared error")
    axes.legend(frameon=False)


def _draw_terms(axes: Axes, terms: Mapping[int, Terms]) -> None:
    """Draw the sizes of the four terms over rounds, filled if a term adds to the error, else hollow."""
    for name, colour, marker in zip(TERM_LABELS, COLOURS, MARKERS, strict=False):
        # A term of 0 has no place on a logarithmic axis.
        values = {round: getattr(round_terms, name) for round, round_terms in terms.items()}
        values = {round: value for round, value in values.items() if value}
        axes.plot(list(values), [abs(value) for value in values.values()], color=colour, linewidth=0.8)

        for is_positive in (True, False):
            sizes = {round: abs(value) for round, value in values.items() if (value > 0) == is_positive}
            fill = colour if is_positive else "white"
            axes.plot(list(sizes), list(sizes.values()), marker, color=colour, markerfacecolor=fill, markersize=5)

        # One entry of the legend for the line and both kinds of markers.
        axes.plot([], [], marker, color=colour, label=TERM_LABELS[name], linestyle="-", linewidth=0.8)

    axes.set(yscale="log", xlabel="round", ylabel="share of the squared error before the round")
    axes.set_title("Terms of its change (hollow: negative)")
    axes.legend(frameon=False, fontsize="small")


def _draw_spectra(axes: Axes, finite: Tensor, infinite: Tensor) -> None:
    for values, label, style in (
        (infinite, "infinite width", INFINITE_STYLE),
        (finite, "at the start", FINITE_STYLE),
    ):
        axes.plot(range(1, len(values) + 1), values.clamp_min(1e-16).numpy(), label=label, **style)
    axes.set(yscale="log", xlabel="eigenvalue, ascending", title="Spectrum of the kernel")
    axes.legend(frameon=False)


def draw_scaling(scaling: Scaling, share: float, clients: int, steps: int, observed: int | None) -> Figure:
    """Draw predicted rounds over the number of clients and over that of local steps, with the theorem's law dashed.

    Parameters
    ----------
    share : share of the first squared error, until which rounds are counted.
    clients, steps : the run's numbers of clients and of local steps.
    observed : rounds that the run took; None: it did not reach the share.
    """
    figure = Figure(figsize=(10, 4), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)

    rounds_by_steps = list(zip(*scaling.rounds, strict=True))
    step_labels = [counted(count, "local step") for count in scaling.steps]
    client_labels = [counted(count, "client") for count in scaling.clients]
    _draw_rounds(left, scaling.clients, rounds_by_steps, step_labels, power=1)
    _draw_rounds(right, scaling.steps, scaling.rounds, client_labels, power=-1)

    for axes, x, name in ((left, clients, "clients"), (right, steps, "local steps a round")):
        if observed is not None:
            axes.plot([x], [observed], "*", color="#000000", markersize=12, label="this run, observed")
        axes.set(xlabel=name, ylabel=f"rounds until {100 * share:.3g}% of the squared error is left")
        axes.legend(frameon=False, fontsize="small")
    _remove_clutter(left, right)
    return figure


def _draw_rounds(
    axes: Axes, x: Sequence[int], lines: Sequence[Sequence[int | None]], labels: Sequence[str], power: int
) -> None:
    """Draw a line of rounds for each label, and a dashed one in proportion to ``x ** power``."""
    guide: list[float] = []
    for rounds, label, colour, marker in zip(lines, labels, COLOURS, MARKERS, strict=False):
        reached = {value: count for value, count in zip(x, rounds, strict=True) if count is not None}
        line_label = label if reached else f"{label}: never"
        axes.plot(list(reached), list(reached.values()), color=colour, marker=marker, markersize=5, label=line_label)

        # The guide starts at the first point that any line has.
        if reached and not guide:
            first_x, first_count = next(iter(reached.items()))
            guide = [first_count * (value / first_x) ** power for value in x]

    if guide:
        law = "proportional to clients" if power > 0 else "proportional to 1 / steps"
        axes.plot(x, guide, color="#999999", linestyle="--", zorder=0, label=law)
    axes.set(xscale="log", yscale="log", xticks=list(x))
    axes.xaxis.set_major_formatter(ticker.ScalarFormatter())
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,g}"))


def _remove_clutter(*panels: Axes) -> None:
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#E4E4E4", linewidth=0.6)
