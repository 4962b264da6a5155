"""FL-NTK of the two-layer network: the theory before a run, and its comparison with every round."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from raypfl.analysis.base import ANALYSES, AnalysedRound, Analysis, LocalStep, picture
from raypfl.analysis.flntk_problem import Problem
from raypfl.analysis.theory.diagnosis import Diagnosis, diagnose
from raypfl.analysis.theory.flntk import TheoremSetting, generalization, posterior_bound, theory_report
from raypfl.analysis.theory.kernels import Spectrum, asymmetry, gram, infinite_width, positive
from raypfl.analysis.theory.scaling import Scaling, numbers_around
from raypfl.analysis.theory.two_layer import Terms
from raypfl.common.errors import ConfigError
from raypfl.common.files import write
from raypfl.learning.objectives import Regression
from raypfl.methods.global_model.fedavg import FedAvg
from raypfl.models.networks import TwoLayerReLU

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Files of a run.
REPORT = "theory.json"
DIAGNOSIS = "diagnosis.json"
KERNELS = "kernels.safetensors"
CURVES = "predicted.safetensors"

# Files of a round.
ERROR = "error.json"
TERMS = "terms.json"

MOST_SAMPLES = 1000
"""Most samples for a picture of rounds by clients and steps, which takes some twenty spectra of kernels."""


@ANALYSES.register("flntk")
class FLNTK(Analysis):
    """Why federated averaging of a wide two-layer ReLU network converges, or does not (Huang et al. 2021).

    For ``model: two_layer``, ``objective: {name: regression, reduction: sum}``, ``method: {name: fedavg, weighting:
    uniform}``, all clients in every round, all samples in every local step, and plain SGD.

    Attributes
    ----------
    kernels_every : number of rounds from one observation of the clients' local steps to the next, for H(t, k) and the
        terms of the error; the first round and the last are always observed.
    delta : probability with which the guarantees may fail.
    share : share of the first squared error, until which rounds are counted.
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
        x = problem.x
        y = problem.y
        u = problem.weights(view.after)
        active = positive(u, x)
        kernel = gram(x, x, active, active)
        infinite = infinite_width(x)
        error = problem.network.outputs(u, x) - y
        first_error = float(error.square().sum())

        setting = problem.setting(self.delta)
        theory = theory_report(setting, x, kernel, infinite, error, self.share)
        values = theory.to_dict() | {"generalization": _generalization(infinite, y, self.delta)}
        write(view.folder / REPORT, json.dumps(values, indent=1))

        # Saved for later rounds.
        tensors = {"finite": kernel, "infinite": infinite, "error": error, "first": u, "signs": problem.network.signs}
        save_file(tensors, view.folder / KERNELS)
        save_file(_predicted(setting, tensors, theory.rate, view.task.rounds), view.folder / CURVES)
        _save_error(view, first_error)

        view.log(flntk_error=first_error, flntk_lambda=theory.least, flntk_factor=theory.rate)
        spectra = {
            "which": ["H_inf"] * len(y) + ["H(0)"] * len(y),
            "index": [*range(len(y))] * 2,
            "value": torch.cat([Spectrum.of(infinite).values, Spectrum.of(kernel).values]),
        }
        view.log_table("flntk_spectra", spectra)

    def before_step(self, step: LocalStep) -> dict[str, Any]:
        module = step.model.module
        assert isinstance(module, TwoLayerReLU)
        batch = step.samples()
        u = step.theta.view(len(module.signs), -1)
        active = positive(u, module.scaled(batch.x)).cpu().numpy()
        return {"active": np.packbits(active, axis=1), "outputs": step.model(step.theta, batch.x)[:, 0]}

    def after_round(self, view: AnalysedRound) -> None:
        if len(view.clients) < view.task.num_clients:
            missing = view.task.num_clients - len(view.clients)
            raise ConfigError(f"The analysis flntk needs all clients in every round; {missing} were not in this one.")

        problem = Problem(view)
        initial = load_file(view.folder / KERNELS)
        curves = self._curves(view, problem, initial)
        u = problem.weights(view.after)
        error = float((problem.network.outputs(u, problem.x) - problem.y).square().sum())
        _save_error(view, error)

        moved = (u - initial["first"]).norm(dim=1)
        switched = float((positive(u, problem.x) != positive(initial["first"], problem.x)).double().mean())
        view.log(
            flntk_error=error,
            flntk_predicted=float(curves["frozen"][view.round]),
            flntk_bound=float(curves["bound"][view.round]),
        )
        view.log(flntk_radius=float(moved.max()), flntk_switched=switched)

        if self.observes(view.round, view.task.rounds):
            _log_round(view, problem, initial["finite"])
        if view.round == view.task.rounds:
            diagnosis = self._diagnose(view, problem, initial, switched)
            view.log_image("flntk", picture(_picture_of_run(view, curves, initial)))
            if len(problem.y) <= MOST_SAMPLES:
                view.log_image("flntk_rounds", picture(self._picture_of_rounds(problem, initial, diagnosis.observed)))

    def _curves(self, view: AnalysedRound, problem: Problem, initial: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the predicted errors of all rounds; predict them again if a resume has changed their number."""
        curves = load_file(view.folder / CURVES)
        if len(curves["frozen"]) != view.task.rounds + 1:
            theory = json.loads((view.folder / REPORT).read_text())
            curves = _predicted(problem.setting(self.delta), initial, theory["rate"], view.task.rounds)
            save_file(curves, view.folder / CURVES)
        return curves

    def _diagnose(
        self, view: AnalysedRound, problem: Problem, initial: Mapping[str, Tensor], switched: float
    ) -> Diagnosis:
        """Diagnose what limits convergence, and write it into a file; `initial` is what :meth:`start` has saved."""
        errors = observed_errors(view.folder, view.round)
        setting = problem.setting(self.delta)
        kernel = initial["finite"]
        infinite = initial["infinite"]
        diagnosis = diagnose(setting, kernel, infinite, initial["error"], self.share, errors, switched)
        values = asdict(diagnosis)

        least = Spectrum.of(infinite).least
        if least > 1e-12:
            u = problem.weights(view.after)
            moved = u - initial["first"]
            values["posterior_bound"] = posterior_bound(
                float((problem.network.outputs(u, problem.x) - problem.y).abs().clamp_max(1).mean()),
                float(moved.norm()),
                float(moved.norm(dim=1).max()),
                samples=len(problem.y),
                width=len(u),
                least=least,
                sigma=problem.module.sigma,
                delta=self.delta,
            )
        write(view.folder / DIAGNOSIS, json.dumps(values, indent=1))
        return diagnosis

    def _picture_of_rounds(self, problem: Problem, initial: Mapping[str, Tensor], observed: int | None) -> Figure:
        from raypfl.analysis.flntk_picture import draw_scaling  # Matplotlib is slow to import

        setting = problem.setting(self.delta)
        clients = numbers_around(setting.clients, most=len(problem.y))
        steps = numbers_around(setting.steps, most=4 * setting.steps)
        scaling = Scaling.of(setting, initial["finite"], initial["error"], self.share, clients, steps)
        return draw_scaling(scaling, self.share, setting.clients, setting.steps, observed)

    def summary(self, folder: Path, round: int) -> list[str]:
        lines = []
        report_file = folder / REPORT
        if report_file.exists():
            lines += _theory_lines(json.loads(report_file.read_text()), observed_errors(folder, round))
        diagnosis_file = folder / DIAGNOSIS
        if diagnosis_file.exists():
            lines.append(json.loads(diagnosis_file.read_text())["sentence"])
        return lines


def _predicted(setting: TheoremSetting, initial: Mapping[str, Tensor], rate: float, rounds: int) -> dict[str, Tensor]:
    """Return the predicted squared errors by round, ``[rounds + 1]`` each.

    Parameters
    ----------
    initial : what :meth:`FLNTK.start` saves; of it, kernels and error.
    rate : the theorem's factor of the squared error per round.
    """
    error = initial["error"]
    first_error = float(error.square().sum())
    return {
        "frozen": setting.map(initial["finite"]).errors(error, rounds),
        "infinite": setting.map(initial["infinite"]).errors(error, rounds),
        "bound": first_error * max(rate, 0.0) ** torch.arange(rounds + 1, dtype=error.dtype),
    }


def _picture_of_run(view: AnalysedRound, curves: Mapping[str, Tensor], initial: Mapping[str, Tensor]) -> Figure:
    from raypfl.analysis.flntk_picture import draw  # Matplotlib is slow to import

    errors = observed_errors(view.folder, view.round)
    # In shares of the squared error before the round.
    terms = {t: Terms(**values) for t, values in _read_rounds(view.folder, TERMS, view.round).items()}
    finite = Spectrum.of(initial["finite"]).values
    infinite = Spectrum.of(initial["infinite"]).values
    return draw(errors, curves, terms, finite, infinite)


def observed_errors(folder: Path, rounds: int) -> dict[int, float]:
    """Return the squared errors by round, of the analysed rounds up to `rounds`."""
    return _read_rounds(folder, ERROR, rounds)


def _read_rounds(folder: Path, name: str, rounds: int) -> dict[int, Any]:
    files = {t: _file_of_round(folder, t, name) for t in range(rounds + 1)}
    return {t: json.loads(file.read_text()) for t, file in files.items() if file.exists()}


def _file_of_round(folder: Path, round: int, name: str) -> Path:
    return folder / f"round-{round:06d}" / name


def _save_error(view: AnalysedRound, error: float) -> None:
    file = _file_of_round(view.folder, view.round, ERROR)
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(error))


def _log_round(view: AnalysedRound, problem: Problem, initial_kernel: Tensor) -> None:
    """Write the terms of an observed round, and log them with the kernel of its last local step."""
    round = problem.round()
    error = float(round.error.square().sum())
    terms = {name: value / error for name, value in asdict(round.terms()).items()}
    _file_of_round(view.folder, view.round, TERMS).write_text(json.dumps(terms))

    last_kernel = round.kernel(len(round.active) - 1)
    kernel_asymmetry = asymmetry(last_kernel)
    view.log(
        flntk_asymmetry=kernel_asymmetry.fraction,
        flntk_least_symmetric=kernel_asymmetry.least_symmetric,
        flntk_kernel_moved=float((last_kernel - initial_kernel).norm() / initial_kernel.norm()),
        flntk_effective_eigenvalue=round.effective_eigenvalue,
        **{f"flntk_{name}": value for name, value in terms.items()},
    )


def _theory_lines(theory: dict[str, Any], errors: dict[int, float]) -> list[str]:
    """Return the theorem's conditions and rounds, and those observed, for a terminal."""
    kappa = theory["condition"]
    condition = "infinite" if kappa is None else f"{kappa:.4g}"
    lines = [
        f"eigenvalues of H(0): least {theory['least']:.4g} (H_inf: {theory['least_infinite']:.4g}), condition number "
        f"{condition}",
        f"bound: {theory['verdict']}",
    ]
    for row in theory["conditions"]:
        mark = "met   " if row["met"] else "unmet "
        lines.append(f"  {mark} {row['name']}: {row['found']}, needs {row['needs']}")

    share = f"{theory['share']:.0%}"
    for name, key in (("FL-NTK's bound", "rounds"), ("the kernel at the start", "predicted_rounds")):
        rounds = "never" if theory[key] is None else theory[key]
        lines.append(f"rounds to {share} of the squared error, by {name}: {rounds}")

    reached = [round for round, error in errors.items() if error <= theory["share"] * errors[0]]
    if reached:
        lines.append(f"rounds observed: {reached[0]}")
    else:
        last = max(errors)
        lines.append(f"observed: {errors[last] / errors[0]:.1%} of the squared error is left after round {last}")

    bound = theory["generalization"]
    if bound is not None:
        empty = ", which says nothing" if bound["vacuous"] else ""
        lines.append(f"bound of the mean absolute error on new samples, clipped at 1: {bound['bound']:.3g}{empty}")
    return lines


def _generalization(infinite: Tensor, y: Tensor, delta: float) -> dict[str, Any] | None:
    """Return the generalization bound; None: H_inf has no inverse."""
    if Spectrum.of(infinite).least <= 1e-12:
        return None
    bound = generalization(infinite, y, delta)
    return asdict(bound) | {"vacuous": bound.vacuous}


def _refuse(view: AnalysedRound) -> None:
    """Raise a ConfigError if the run is not one that the theorems are about."""
    training = view.training
    method = view.method
    task = view.task
    plain_sgd = training.optimizer == "sgd" and not (training.momentum or training.weight_decay or training.clip_norm)
    plain_fedavg = type(method) is FedAvg and (method.weighting, method.server_optimizer) == ("uniform", "sgd")
    most_samples = task.num_samples.max()

    # Setting -> whether the run has it.
    needed = {
        "model: two_layer": isinstance(task.model.module, TwoLayerReLU),
        "objective: {name: regression, reduction: sum}": task.objective == Regression(reduction="sum"),
        "method: {name: fedavg, weighting: uniform}": plain_fedavg,
        "training.optimizer: sgd without momentum, weight_decay and clip_norm": plain_sgd,
        "training.schedule: constant without warmup_rounds": (
            training.schedule == "constant" and not training.warmup_rounds
        ),
        f"training.batch_size: {most_samples} or more, so that a step takes all samples": (
            training.batch_size >= most_samples
        ),
        "data.unseen_fraction: 0": not len(task.unseen),
        "cohort.fraction: 1, so that all clients take part": view.cohort_size == task.num_trained,
        f"no {' and no '.join(view.departures)}": not view.departures,
    }

    missing = [name for name, met in needed.items() if not met]
    if missing:
        raise ConfigError(
            f"The analysis flntk needs other settings than these: {'; '.join(missing)}. The analysis ntk "
            "takes any network and method."
        )
