"""The empirical neural tangent kernel of rounds, for any network and any method whose clients train it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import sqrt
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from raypfl.analysis.base import ANALYSES, AnalysedRound, Analysis, LocalStep, Observation, picture
from raypfl.analysis.theory.empirical import Side, kernel, push_forward, sketch
from raypfl.analysis.theory.kernels import Spectrum, asymmetry
from raypfl.common.errors import ConfigError
from raypfl.common.files import write
from raypfl.models.flat import FlatModel, FunctionalCall

DIAGNOSIS = "diagnosis.json"


@ANALYSES.register("ntk")
class NTK(Analysis):
    """How far rounds are those of a linear model: the neural tangent kernel on a few training samples of every client.

    Rows of the kernel belong to the model from which a client starts, columns to the clients' models before their first
    and their last local step, each on samples of its own. Networks are in evaluation mode; batch norm takes the running
    statistics of the model that a row or a column belongs to.

    Attributes
    ----------
    every : rounds between two that are analysed; the last one always is.
    probe : samples of all clients together, in equal numbers, at least one of each.
    outputs : ``sum``: one row a sample, of the sum of its outputs over the square root of their number; ``all``: a row
        for each output.
    sketch : numbers that stand for a gradient, for large networks: every client then computes gradients of its own
        samples only, and an entry errs by about one over the square root of `sketch`. A row is of the model from which
        its own client starts. 0: exact.
    """

    every: int = 10
    probe: int = 64
    outputs: Literal["sum", "all"] = "sum"
    sketch: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.probe < 1 or self.sketch < 0 or self.outputs not in ("sum", "all"):
            raise ConfigError(
                "analyses.ntk needs a probe of 1 or more, a sketch of 0 or more, and outputs that are 'sum' or 'all'."
            )

    def before_step(self, step: LocalStep) -> dict[str, Any] | None:
        if step.training or step.step not in (0, step.steps - 1):
            return None
        each = self.each(step.num_clients)
        columns = self.side(step.model, step.theta, step.samples().x[:each])
        if self.sketch:
            return {"gradients": sketch(columns, self.count(columns), self.sketch)}
        everyone = torch.cat([step.samples(client).x[:each] for client in range(step.num_clients)])
        rows = self.side(step.model, step.start, everyone)
        return {"kernel": kernel(rows, columns, self.count(columns))}

    def after_round(self, view: AnalysedRound) -> None:
        each, steps = self.each(view.task.num_clients), {client: list(view.steps(client)) for client in view.clients}
        if not all(steps.values()):
            return
        sizes = np.minimum(view.task.num_samples, each)
        start, end = _sketched(steps.values()) if self.sketch else _exact(steps, sizes)
        folder = view.folder / f"round-{view.round:06d}"
        np.save(folder / "kernel.npy", start.numpy())
        np.save(folder / "kernel-last-step.npy", end.numpy())
        here = sizes[list(view.clients)]
        owner = np.repeat(np.arange(len(here)), here * (len(start) // int(here.sum())))
        spectrum = Spectrum.of((start + start.T) / 2)
        found = self.numbers(start, spectrum, owner) | {
            "drift": float((end - start).norm() / start.norm()),
            "asymmetry": asymmetry(end).fraction,
        }
        if view.before is not None and view.after is not None:
            x = torch.cat([view.samples(client).x[:each] for client in view.clients])
            with view.task.model.mode(train=False):
                found["nonlinear"] = nonlinear(view.task.model, view.before, view.after, x)
        view.log(**{f"ntk_{name}": value for name, value in found.items()})
        index = {"index": np.arange(len(spectrum.values))}
        view.log_table("ntk_spectra", index | {"value": spectrum.values})
        if view.round == view.task.rounds:
            write(view.folder / DIAGNOSIS, json.dumps({"sentence": sentence(view.round, found), **found}, indent=1))
            view.log_image("ntk", picture(_draw(start, end, spectrum.values, np.flatnonzero(np.diff(owner)) + 1)))

    def summary(self, folder: Path, round: int) -> list[str]:
        file = folder / DIAGNOSIS
        return [json.loads(file.read_text())["sentence"]] if file.exists() else []

    def of_model(self, model: FlatModel, theta: Tensor, x: Tensor) -> Tensor:
        """The symmetric kernel of one model ``[P+B]`` on inputs ``x[n, ...]``."""
        side = self.side(model, theta, x)
        if self.sketch:
            rows = sketch(side, self.count(side), self.sketch)
            return rows @ rows.T
        return kernel(side, side, self.count(side))

    def numbers(self, kernel: Tensor, spectrum: Spectrum, owner: np.ndarray) -> dict[str, float]:
        """Of a kernel ``[n, n]`` with this spectrum, rows of which belong to clients ``int64[n]``.

        The least eigenvalue of a sketch says nothing about that of the kernel, and is left out.
        """
        found = {"largest": spectrum.largest, "largest_share": spectrum.largest / float(spectrum.values.sum())}
        if not self.sketch:
            found["least"] = spectrum.least
        if (ratio := between(kernel, owner)) is not None:
            found["between"] = ratio
        return found

    def each(self, clients: int) -> int:
        """Samples of each client."""
        return max(1, self.probe // clients)

    def side(self, model: FlatModel, theta: Tensor, x: Tensor) -> Side:
        """One side of a kernel: a model vector ``[P+B]`` on these inputs."""
        network = at_statistics(model, theta)

        def outputs(p: Tensor, inputs: Tensor) -> Tensor:
            rows = network(p, inputs)
            return rows if self.outputs == "all" else rows.sum(1, keepdim=True) / sqrt(rows.shape[1])

        return Side(outputs, model.parameters(theta), x)

    def count(self, side: Side) -> int:
        """Rows of the kernel for a sample."""
        with torch.no_grad():
            return side.network(side.parameters, side.x[:1]).shape[1]


def _sketched(steps: Iterable[Sequence[Observation]]) -> tuple[Tensor, Tensor]:
    """The kernels before the first and the last local step, of sketched gradients."""
    first, last = (torch.from_numpy(np.concatenate([s[at].arrays["gradients"] for s in steps])) for at in (0, -1))
    return first @ first.T, first @ last.T


def _exact(steps: Mapping[int, Sequence[Observation]], sizes: np.ndarray) -> tuple[Tensor, Tensor]:
    """The kernels before the first and the last local step, with rows of the clients that took part."""
    ends = np.cumsum(sizes)
    count = len(next(iter(steps.values()))[0].arrays["kernel"]) // int(ends[-1])
    here = np.concatenate([np.arange(ends[c] - sizes[c], ends[c]) for c in steps])
    rows = (here[:, None] * count + np.arange(count)).flatten()
    first, last = (
        torch.from_numpy(np.concatenate([seen[at].arrays["kernel"][rows] for seen in steps.values()], axis=1))
        for at in (0, -1)
    )
    return first, last


def at_statistics(model: FlatModel, theta: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """The network as a function of its parameters ``[P]``, with the batch-norm statistics in ``theta[P+B]``."""

    def network(p: Tensor, inputs: Tensor) -> Tensor:
        with FunctionalCall(model, model.buffers(theta)):
            return model(p, inputs).flatten(1)

    return network


def between(symmetric: Tensor, owner: np.ndarray) -> float | None:
    """Mean size of the entries between two clients over that of entries within one, diagonal left out of both.

    None if there are no such entries: of one client, or of one sample each.
    """
    own = torch.from_numpy(owner[:, None] == owner)
    inside = own & ~torch.eye(len(owner), dtype=torch.bool)
    if own.all() or not inside.any():
        return None
    return float(symmetric[~own].abs().mean() / symmetric[inside].abs().mean())


def nonlinear(model: FlatModel, before: Tensor, after: Tensor, x: Tensor) -> float:
    """By how much the change of the outputs differs from the first-order one, in parts of its size."""
    side = Side(at_statistics(model, before), model.parameters(before), x)
    moved = push_forward(side, model.parameters(after) - side.parameters)
    with torch.no_grad():
        change = side.network(model.parameters(after), x) - side.network(side.parameters, x)
    return float((change - moved).norm() / change.norm())


def sentence(round: int, found: dict[str, float]) -> str:
    """What keeps this round from being one of a linear model, with its number."""
    limits = {
        "nonlinear": "the length of the steps: the outputs' change differs from the linear one by {:.0%} of its size",
        "drift": "the number of local steps: between a client's first and last one, its kernel changes by {:.0%}",
    }
    worst = max((name for name in limits if name in found), key=lambda name: found[name])
    if found[worst] < 0.1:
        return (
            f"In round {round}, training is almost that of a linear model (less than 10% is not), so that the kernel's "
            f"spectrum decides: the largest eigenvalue is {found['largest_share']:.0%} of the sum of all."
        )
    return f"In round {round}, what departs most from a linear model is {limits[worst].format(found[worst])}."


def _draw(start: Tensor, end: Tensor, spectrum: Tensor, borders: Sequence[int] | np.ndarray) -> Any:
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(12, 4), dpi=120, layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    top = float(start.abs().max())
    for axes, matrix, title in ((left, start, "First local step"), (middle, end, "Last local step")):
        image = axes.imshow(matrix.numpy(), cmap="RdBu_r", vmin=-top, vmax=top)
        axes.set(title=f"Kernel: {title.lower()}", xlabel="samples of the clients' models", xticks=[], yticks=[])
        for border in borders if len(borders) < 60 else ():
            axes.axhline(border - 0.5, color="#777777", linewidth=0.4)
            axes.axvline(border - 0.5, color="#777777", linewidth=0.4)
    left.set_ylabel("samples of the model that clients start from")
    figure.colorbar(image, ax=middle)
    right.plot(range(1, len(spectrum) + 1), spectrum.clamp_min(1e-16).numpy(), color="#0072B2")
    right.set(yscale="log", xlabel="eigenvalue, ascending", title="Spectrum, first local step")
    right.grid(color="#E4E4E4", linewidth=0.6)
    return figure
