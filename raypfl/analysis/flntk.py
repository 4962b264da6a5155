"""FL-NTK of the two-layer network: the theory before a run, and what becomes of it in every round."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from raypfl.analysis.base import ANALYSES, AnalysedRound, Analysis, LocalStep, picture
from raypfl.analysis.theory.flntk import TheoremSetting, generalization, posterior_bound, theory_report
from raypfl.analysis.theory.kernels import Spectrum, asymmetry, gram, infinite_width, positive
from raypfl.analysis.theory.limits import Diagnosis, diagnose
from raypfl.analysis.theory.scaling import Scaling, around
from raypfl.analysis.theory.two_layer import Round, Terms, TwoLayer
from raypfl.common.errors import ConfigError
from raypfl.common.files import write
from raypfl.learning.objectives import Regression
from raypfl.methods.global_model.fedavg import FedAvg
from raypfl.models.networks import TwoLayerReLU

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REPORT, DIAGNOSIS, KERNELS, CURVES = "theory.json", "diagnosis.json", "kernels.safetensors", "predicted.safetensors"
ERROR, TERMS = "error.json", "terms.json"
"""Files of a round."""

MOST_SAMPLES = 1000
"""Above which the picture of rounds by clients and steps is left out: it takes some twenty spectra of kernels."""


@ANALYSES.register("flntk")
class FLNTK(Analysis):
    """Why federated averaging of a wide two-layer ReLU network converges, or does not (Huang et al. 2021).

    For ``model: two_layer``, ``objective: {name: regression, reduction: sum}``, ``method: {name: fedavg, weighting:
    uniform}``, all clients in every round, all samples in every local step, and plain SGD.

    Attributes
    ----------
    kernels_every : rounds between two in which the clients' local steps are observed, for H(t, k) and the terms of the
        error; the first round and the last always are.
    delta : probability with which the guarantees may fail.
    share : of the first squared error, until which rounds are counted.
    """

    kernels_every: int = 10
    delta: float = 0.1
    share: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kernels_every < 1 or not 0 < self.delta < 1 or not 0 < self.share < 1:
            raise ConfigError("analyses.flntk needs kernels_every of 1 or more, and delta and share between 0 and 1.")

    def observes(self, round: int, rounds: int) -> bool:
        return round in (1, rounds) or round % self.kernels_every == 0

    def start(self, view: AnalysedRound) -> None:
        _refuse(view)
        problem = Problem(view)
        x, y, u = problem.x, problem.y, problem.weights(view.after)
        active = positive(u, x)
        kernel, infinite = gram(x, x, active, active), infinite_width(x)
        error, setting, rounds = problem.network.outputs(u, x) - y, problem.setting(self.delta), view.task.rounds
        found = theory_report(setting, x, kernel, infinite, error, self.share)
        first = float(error.square().sum())
        curves = {
            "frozen": setting.map(kernel).errors(error, rounds),
            "infinite": setting.map(infinite).errors(error, rounds),
            "bound": first * max(found.rate, 0.0) ** torch.arange(rounds + 1, dtype=y.dtype),
        }
        kept = {"finite": kernel, "infinite": infinite, "error": error, "first": u, "signs": problem.network.signs}
        save_file(kept, view.folder / KERNELS)
        save_file(curves, view.folder / CURVES)
        told = found.to_dict() | {"generalization": _generalization(infinite, y, self.delta)}
        write(view.folder / REPORT, json.dumps(told, indent=1))
        _keep_error(view, first)
        view.log(flntk_error=first, flntk_lambda=found.least, flntk_factor=found.rate)
        values = [Spectrum.of(one).values for one in (infinite, kernel)]
        columns = {"which": ["H_inf"] * len(y) + ["H(0)"] * len(y), "index": [*range(len(y))] * 2}
        view.log_table("flntk_spectra", columns | {"value": torch.cat(values)})

    def before_step(self, step: LocalStep) -> dict[str, Any]:
        module, batch = step.model.module, step.samples()
        assert isinstance(module, TwoLayerReLU)
        x, u = module.scaled(batch.x), step.theta.view(len(module.signs), -1)
        active = positive(u, x).cpu().numpy()
        return {"active": np.packbits(active, axis=1), "outputs": step.model(step.theta, batch.x)[:, 0]}

    def after_round(self, view: AnalysedRound) -> None:
        if len(view.clients) < view.task.num_clients:
            missing = view.task.num_clients - len(view.clients)
            raise ConfigError(f"The analysis flntk needs all clients in every round; {missing} were not in this one.")
        problem, kept = Problem(view), load_file(view.folder / KERNELS)
        u, first = problem.weights(view.after), kept["first"]
        residual = problem.network.outputs(u, problem.x) - problem.y
        error = float(residual.square().sum())
        moved = (u - first).norm(dim=1)
        switched = float((positive(u, problem.x) != positive(first, problem.x)).double().mean())
        curves = load_file(view.folder / CURVES)
        predicted = float(curves["frozen"][view.round])
        _keep_error(view, error)
        view.log(flntk_error=error, flntk_predicted=predicted, flntk_bound=float(curves["bound"][view.round]))
        view.log(flntk_radius=float(moved.max()), flntk_switched=switched)
        if self.observes(view.round, view.task.rounds):
            _log_round(view, problem, kept["finite"])
        if view.round == view.task.rounds:
            diagnosis = self._diagnose(view, problem, kept, switched)
            view.log_image("flntk", picture(_picture_of_run(view, curves, kept)))
            if len(problem.y) <= MOST_SAMPLES:
                view.log_image("flntk_rounds", picture(self._picture_of_rounds(problem, kept, diagnosis.observed)))

    def _diagnose(
        self, view: AnalysedRound, problem: Problem, kept: Mapping[str, Tensor], switched: float
    ) -> Diagnosis:
        """Say what limits convergence, and write it into a file."""
        errors = observed_errors(view.folder, view.round)
        setting = problem.setting(self.delta)
        diagnosis = diagnose(setting, kept["finite"], kept["infinite"], kept["error"], self.share, errors, switched)
        values = asdict(diagnosis)
        least = Spectrum.of(kept["infinite"]).least
        if least > 1e-12:
            u = problem.weights(view.after)
            values["posterior_bound"] = posterior_bound(
                float((problem.network.outputs(u, problem.x) - problem.y).abs().clamp_max(1).mean()),
                float((u - kept["first"]).norm()),
                float((u - kept["first"]).norm(dim=1).max()),
                samples=len(problem.y),
                width=len(u),
                least=least,
                sigma=problem.module.sigma,
                delta=self.delta,
            )
        write(view.folder / DIAGNOSIS, json.dumps(values, indent=1))
        return diagnosis

    def _picture_of_rounds(self, problem: Problem, kept: Mapping[str, Tensor], observed: int | None) -> Figure:
        from raypfl.analysis.flntk_picture import draw_scaling  # Matplotlib is slow to import

        setting = problem.setting(self.delta)
        clients = around(setting.clients, most=len(problem.y))
        steps = around(setting.steps, most=4 * setting.steps)
        scaling = Scaling.of(setting, kept["finite"], kept["error"], self.share, clients, steps)
        return draw_scaling(scaling, self.share, setting.clients, setting.steps, observed)

    def summary(self, folder: Path, round: int) -> list[str]:
        before, after = (json.loads(f.read_text()) if (f := folder / n).exists() else {} for n in (REPORT, DIAGNOSIS))
        lines = _theory_lines(before, observed_errors(folder, round)) if before else []
        return lines + ([after["sentence"]] if after else [])


def _picture_of_run(view: AnalysedRound, curves: Mapping[str, Tensor], kept: Mapping[str, Tensor]) -> Figure:
    from raypfl.analysis.flntk_picture import draw  # Matplotlib is slow to import

    errors = observed_errors(view.folder, view.round)
    terms = _observed_terms(view.folder, view.round)
    finite, infinite = (Spectrum.of(kept[name]).values for name in ("finite", "infinite"))
    return draw(errors, curves, terms, finite, infinite)


@dataclass(frozen=True)
class Problem:
    """The data and the network of a round, with samples in the order of clients."""

    view: AnalysedRound

    @cached_property
    def _batches(self) -> list[Any]:
        return [self.view.samples(client) for client in range(self.view.task.num_clients)]

    @property
    def module(self) -> TwoLayerReLU:
        module = self.view.task.model.module
        assert isinstance(module, TwoLayerReLU)
        return module

    @cached_property
    def x(self) -> Tensor:
        return torch.cat([self.module.scaled(batch.x) for batch in self._batches]).double().cpu()

    @cached_property
    def y(self) -> Tensor:
        return torch.cat([batch.y.flatten() for batch in self._batches]).double().cpu()

    @cached_property
    def parts(self) -> list[Tensor]:
        sizes = [len(batch.y) for batch in self._batches]
        return list(torch.arange(sum(sizes)).split(sizes))

    @cached_property
    def network(self) -> TwoLayer:
        return TwoLayer(self.module.signs.detach().double().cpu())

    def weights(self, theta: Tensor | None) -> Tensor:
        assert theta is not None
        return theta.double().cpu().view(len(self.network.signs), -1)

    def setting(self, delta: float) -> TheoremSetting:
        view, steps = self.view, _steps(self.view)
        assert isinstance(view.method, FedAvg)
        server_rate = view.method.server_lr
        return TheoremSetting(
            parts=self.parts,
            width=len(self.network.signs),
            steps=steps,
            rate=view.training.lr,
            server_rate=1.0 if server_rate is None else server_rate,
            sigma=self.module.sigma,
            delta=delta,
        )

    def round(self) -> Round:
        """The round with what was observed of the clients' local steps."""
        view, width, setting = self.view, len(self.network.signs), self.setting(0.1)
        active = torch.empty(setting.steps, len(self.y), width, dtype=torch.bool)
        local = torch.empty(setting.steps, len(self.y), dtype=torch.float64)
        for client, part in enumerate(self.parts):
            for one in view.steps(client):
                bits = np.unpackbits(one.arrays["active"], axis=1, count=width).astype(bool)
                active[one.step, part] = torch.from_numpy(bits)
                local[one.step, part] = torch.from_numpy(one.arrays["outputs"]).double()
        scale = torch.full_like(self.y, setting.server_rate * setting.rate / setting.clients)
        before, after = self.weights(view.before), self.weights(view.after)
        return Round(self.network, self.x, self.y, before, after, list(active), local, scale)


def observed_errors(folder: Path, rounds: int) -> dict[int, float]:
    """Squared errors by round, as far as the run has come and as often as it was analysed."""
    return _read_rounds(folder, ERROR, rounds)


def _observed_terms(folder: Path, rounds: int) -> dict[int, Terms]:
    """The terms of the error by round, in shares of the squared error before it."""
    return {t: Terms(**values) for t, values in _read_rounds(folder, TERMS, rounds).items()}


def _read_rounds(folder: Path, name: str, rounds: int) -> dict[int, Any]:
    files = {t: _file_of_round(folder, t, name) for t in range(rounds + 1)}
    return {t: json.loads(file.read_text()) for t, file in files.items() if file.exists()}


def _file_of_round(folder: Path, round: int, name: str) -> Path:
    return folder / f"round-{round:06d}" / name


def _keep_error(view: AnalysedRound, error: float) -> None:
    file = _file_of_round(view.folder, view.round, ERROR)
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(error))


def _log_round(view: AnalysedRound, problem: Problem, first: Tensor) -> None:
    one = problem.round()
    error = float(one.error.square().sum())
    terms = {name: value / error for name, value in asdict(one.terms()).items()}
    _file_of_round(view.folder, view.round, TERMS).write_text(json.dumps(terms))
    last = one.kernel(len(one.active) - 1)
    of = asymmetry(last)
    view.log(
        flntk_asymmetry=of.fraction,
        flntk_least_symmetric=of.least_symmetric,
        flntk_kernel_moved=float((last - first).norm() / first.norm()),
        flntk_effective_eigenvalue=one.effective_eigenvalue,
        **{f"flntk_{name}": value for name, value in terms.items()},
    )


def _theory_lines(told: dict[str, Any], observed: dict[int, float]) -> list[str]:
    """The theorem's conditions and rounds, and those observed, for a terminal."""
    first, reached = observed[0], [t for t, e in observed.items() if e <= told["share"] * observed[0]]
    share, kappa = f"{told['share']:.0%}", told["condition"]
    rounds = [("FL-NTK's bound", told["rounds"]), ("the kernel at the start", told["predicted_rounds"])]
    last = max(observed)
    lines = [
        f"eigenvalues of H(0): least {told['least']:.4g} (H_inf: {told['least_infinite']:.4g}), condition number "
        + ("infinite" if kappa is None else f"{kappa:.4g}"),
        f"bound: {told['verdict']}",
        *(
            f"  {'met   ' if one['met'] else 'unmet '} {one['name']}: {one['found']}, needs {one['needs']}"
            for one in told["conditions"]
        ),
        *(f"rounds to {share} of the squared error, by {name}: {'never' if n is None else n}" for name, n in rounds),
        f"rounds observed: {reached[0]}"
        if reached
        else f"observed: {observed[last] / first:.1%} of the squared error is left after round {last}",
    ]
    if (general := told["generalization"]) is not None:
        empty = ", which says nothing" if general["vacuous"] else ""
        lines.append(f"bound of the mean absolute error on new samples, clipped at 1: {general['bound']:.3g}{empty}")
    return lines


def _generalization(infinite: Tensor, y: Tensor, delta: float) -> dict[str, Any] | None:
    if Spectrum.of(infinite).least <= 1e-12:
        return None
    found = generalization(infinite, y, delta)
    return asdict(found) | {"vacuous": found.vacuous}


def _steps(view: AnalysedRound) -> int:
    return view.training.epochs if view.training.steps is None else view.training.steps


def _refuse(view: AnalysedRound) -> None:
    training, method, task = view.training, view.method, view.task
    plain = training.optimizer == "sgd" and not (training.momentum or training.weight_decay or training.clip_norm)
    needed = {
        "model: two_layer": isinstance(task.model.module, TwoLayerReLU),
        "objective: {name: regression, reduction: sum}": task.objective == Regression(reduction="sum"),
        "method: {name: fedavg, weighting: uniform}": type(method) is FedAvg
        and (method.weighting, method.server_optimizer) == ("uniform", "sgd"),
        "training.optimizer: sgd without momentum, weight_decay and clip_norm": plain,
        "training.schedule: constant without warmup_rounds": training.schedule == "constant"
        and not training.warmup_rounds,
        f"training.batch_size: {task.num_samples.max()} or more, so that a step takes all samples": training.batch_size
        >= task.num_samples.max(),
        "data.unseen_fraction: 0": not len(task.unseen),
        "cohort.fraction: 1, so that all clients take part": view.cohort_size == task.num_clients,
    }
    if missing := [name for name, met in needed.items() if not met]:
        raise ConfigError(
            f"The analysis flntk needs other settings than these: {'; '.join(missing)}. The analysis ntk "
            "takes any network and method."
        )
