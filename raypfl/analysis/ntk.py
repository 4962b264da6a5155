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
    """How close rounds are to those of a linear model: the neural tangent kernel on a few samples of every client.

    Rows of the kernel belong to the model from which a client starts, columns to the clients' models before their first
    and their last local step, each on its own samples. Networks are in evaluation mode; batch norm takes the running
    statistics of the model that a row or a column belongs to.

    Attributes
    ----------
    every : number of rounds from one analysis to the next; the last round is always analysed.
    probe : number of training samples of all clients together, in equal numbers, at least one of each.
    outputs : rows of a sample: ``sum``, one row for the sum of its outputs over the square root of their number; or
        ``all``, a row for each output.
    sketch : size of a sketched gradient, for large networks: every client then computes gradients of its own samples
        only, and an entry errs by about one over the square root of `sketch`. A row is of the model from which its own
        client starts. 0: exact.
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

    def start(self, view: AnalysedRound) -> None:
        model = view.task.model
        client = int(view.task.num_samples.argmax())
        side = self.side(model, model.init(0), view.samples(client).x[:1])
        try:
            with model.mode(train=False):
                kernel(side, side, self.rows_per_sample(side))
        except RuntimeError as error:
            raise ConfigError(
                "analyses.ntk takes a gradient for each sample, by torch.func.vmap and autograd, which fails with this "
                f"network: {str(error).splitlines()[0]} Choose another network, or leave the analysis out."
            ) from error

    def before_step(self, step: LocalStep) -> dict[str, Any] | None:
        if step.training or step.step not in (0, step.steps - 1):
            return None
        per_client = self.samples_per_client(step.num_clients)
        columns = self.side(step.model, step.theta, step.samples().x[:per_client])
        if self.sketch:
            return {"gradients": sketch(columns, self.rows_per_sample(columns), self.sketch)}

        all_samples = torch.cat([step.samples(client).x[:per_client] for client in range(step.num_clients)])
        rows = self.side(step.model, step.start, all_samples)
        return {"kernel": kernel(rows, columns, self.rows_per_sample(columns))}

    def after_round(self, view: AnalysedRound) -> None:
        steps = {client: list(view.steps(client)) for client in view.clients}
        if not all(steps.values()):
            return

        per_client = self.samples_per_client(view.task.num_clients)
        sizes = np.minimum(view.task.num_samples, per_client)
        start, end = _sketched(steps.values()) if self.sketch else _exact(steps, sizes)
        folder = view.folder / f"round-{view.round:06d}"
        np.save(folder / "kernel.npy", start.numpy())
        np.save(folder / "kernel-last-step.npy", end.numpy())

        cohort_sizes = sizes[list(view.clients)]
        rows_per_sample = len(start) // int(cohort_sizes.sum())
        owner = np.repeat(np.arange(len(cohort_sizes)), cohort_sizes * rows_per_sample)
        spectrum = Spectrum.of((start + start.T) / 2)
        numbers = self.numbers(start, spectrum, owner) | {
            "drift": float((end - start).norm() / start.norm()),
            "asymmetry": asymmetry(end).fraction,
        }
        if view.before is not None and view.after is not None:
            x = torch.cat([view.samples(client).x[:per_client] for client in view.clients])
            with view.task.model.mode(train=False):
                numbers["nonlinear"] = nonlinear(view.task.model, view.before, view.after, x)

        view.log(**{f"ntk_{name}": value for name, value in numbers.items()})
        view.log_table("ntk_spectra", {"index": np.arange(len(spectrum.values)), "value": spectrum.values})

        if view.round == view.task.rounds:
            diagnosis = {"sentence": sentence(view.round, numbers), **numbers}
            write(view.folder / DIAGNOSIS, json.dumps(diagnosis, indent=1))
            borders = np.flatnonzero(np.diff(owner)) + 1
            view.log_image("ntk", picture(_draw(start, end, spectrum.values, borders)))

    def summary(self, folder: Path, round: int) -> list[str]:
        file = folder / DIAGNOSIS
        return [json.loads(file.read_text())["sentence"]] if file.exists() else []

    def of_model(self, model: FlatModel, theta: Tensor, x: Tensor) -> Tensor:
        """Return the symmetric kernel of one model ``[P+B]`` on inputs ``x[n, ...]``."""
        side = self.side(model, theta, x)
        if self.sketch:
            rows = sketch(side, self.rows_per_sample(side), self.sketch)
            return rows @ rows.T
        return kernel(side, side, self.rows_per_sample(side))

    def numbers(self, kernel: Tensor, spectrum: Spectrum, owner: np.ndarray) -> dict[str, float]:
        """Return what is logged of a kernel ``[n, n]`` with this spectrum; its rows belong to clients ``int64[n]``."""
        numbers = {"largest": spectrum.largest, "largest_share": spectrum.largest / float(spectrum.values.sum())}
        if not self.sketch:
            # The least eigenvalue of a sketch says nothing about that of the kernel.
            numbers["least"] = spectrum.least
        ratio = between(kernel, owner)
        if ratio is not None:
            numbers["between"] = ratio
        return numbers

    def samples_per_client(self, num_clients: int) -> int:
        """Return the number of samples of each client in the probe."""
        return max(1, self.probe // num_clients)

    def side(self, model: FlatModel, theta: Tensor, x: Tensor) -> Side:
        """Return one side of a kernel: a model vector ``[P+B]`` on these inputs."""
        network = at_statistics(model, theta)

        def outputs(p: Tensor, inputs: Tensor) -> Tensor:
            rows = network(p, inputs)
            if self.outputs == "all":
                return rows
            return rows.sum(1, keepdim=True) / sqrt(rows.shape[1])

        return Side(outputs, model.parameters(theta), x)

    def rows_per_sample(self, side: Side) -> int:
        """Return the number of the kernel's rows for each sample."""
        with torch.no_grad():
            return side.network(side.parameters, side.x[:1]).shape[1]


def _sketched(steps: Iterable[Sequence[Observation]]) -> tuple[Tensor, Tensor]:
    """Return the kernels before the first and the last local step, of sketched gradients."""
    first = np.concatenate([observations[0].arrays["gradients"] for observations in steps])
    last = np.concatenate([observations[-1].arrays["gradients"] for observations in steps])
    start = torch.from_numpy(first)
    return start @ start.T, start @ torch.from_numpy(last).T


def _exact(steps: Mapping[int, Sequence[Observation]], sizes: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return the kernels before the first and the last local step, with rows of the clients that took part.

    Each client has kept its columns, with rows of all clients' samples; `sizes` is the number of these of each client.
    """
    ends = np.cumsum(sizes)
    any_kernel = next(iter(steps.values()))[0].arrays["kernel"]
    rows_per_sample = len(any_kernel) // int(ends[-1])
    samples = np.concatenate([np.arange(ends[client] - sizes[client], ends[client]) for client in steps])
    rows = (samples[:, None] * rows_per_sample + np.arange(rows_per_sample)).flatten()

    first = np.concatenate([observations[0].arrays["kernel"][rows] for observations in steps.values()], axis=1)
    last = np.concatenate([observations[-1].arrays["kernel"][rows] for observations in steps.values()], axis=1)
    return torch.from_numpy(first), torch.from_numpy(last)


def at_statistics(model: FlatModel, theta: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the network as a function of its parameters ``[P]``, with the batch-norm statistics in ``theta[P+B]``."""

    def network(p: Tensor, inputs: Tensor) -> Tensor:
        with FunctionalCall(model, model.buffers(theta)):
            return model(p, inputs).flatten(1)

    return network


def between(symmetric: Tensor, owner: np.ndarray) -> float | None:
    """Return the mean size of entries between two clients over that of entries within one, without the diagonal.

    None: there are no such entries, with one client or one sample each.
    """
    same_client = torch.from_numpy(owner[:, None] == owner)
    within = same_client & ~torch.eye(len(owner), dtype=torch.bool)
    if same_client.all() or not within.any():
        return None
    return float(symmetric[~same_client].abs().mean() / symmetric[within].abs().mean())


def nonlinear(model: FlatModel, before: Tensor, after: Tensor, x: Tensor) -> float:
    """Return the difference of the outputs' change to the first-order one, relative to the change."""
    side = Side(at_statistics(model, before), model.parameters(before), x)
    moved = push_forward(side, model.parameters(after) - side.parameters)
    with torch.no_grad():
        change = side.network(model.parameters(after), x) - side.network(side.parameters, x)
    return float((change - moved).norm() / change.norm())


def sentence(round: int, numbers: dict[str, float]) -> str:
    """Name the main deviation of this round from that of a linear model, with its number."""
    limits = {
        "nonlinear": "the length of the steps: the outputs' change differs from the linear one by {:.0%} of its size",
        "drift": "the number of local steps: between a client's first and last one, its kernel changes by {:.0%}",
    }
    measured = [name for name in limits if name in numbers]
    worst = max(measured, key=lambda name: numbers[name])
    if numbers[worst] < 0.1:
        return (
            f"In round {round}, training is almost that of a linear model (less than 10% is not), so the kernel's "
            f"spectrum decides: the largest eigenvalue is {numbers['largest_share']:.0%} of the sum of all."
        )
    return f"In round {round}, what departs most from a linear model is {limits[worst].format(numbers[worst])}."


def _draw(start: Tensor, end: Tensor, spectrum: Tensor, borders: Sequence[int] | np.ndarray) -> Any:
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(12, 4), dpi=120, layout="constrained")
    left, middle, right = figure.subplots(1, 3)

    top = float(start.abs().max())
    for axes, matrix, title in ((left, start, "first local step"), (middle, end, "last local step")):
        image = axes.imshow(matrix.numpy(), cmap="RdBu_r", vmin=-top, vmax=top)
        axes.set(title=f"Kernel: {title}", xlabel="samples of the clients' models", xticks=[], yticks=[])
        for border in borders if len(borders) < 60 else ():
            axes.axhline(border - 0.5, color="#777777", linewidth=0.4)
            axes.axvline(border - 0.5, color="#777777", linewidth=0.4)
    left.set_ylabel("samples of the model that clients start from")
    figure.colorbar(image, ax=middle)

    right.plot(range(1, len(spectrum) + 1), spectrum.clamp_min(1e-16).numpy(), color="#0072B2")
    right.set(yscale="log", xlabel="eigenvalue, ascending", title="Spectrum, first local step")
    right.grid(color="#E4E4E4", linewidth=0.6)
    return figure
