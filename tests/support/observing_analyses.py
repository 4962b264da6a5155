"""Analyses for tests; some fail or disturb the run on purpose."""

from __future__ import annotations

from math import prod
from pathlib import Path

import torch
from torch import nn

from raypfl.analysis import AnalysedRound, Analysis, LocalStep


def dropping(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Return a network with batch norm and dropout."""
    layers = [nn.Flatten(), nn.Linear(prod(input_shape), 8), nn.BatchNorm1d(8)]
    return nn.Sequential(*layers, nn.Dropout(0.4), nn.Linear(8, num_classes))


class RecordsSteps(Analysis):
    """Record all that a step shows, and do everything on purpose that could disturb training."""

    def start(self, view: AnalysedRound) -> None:
        assert view.round == 0 and torch.equal(view.before, view.after)
        view.log(norm=view.after.norm())

    def before_step(self, step: LocalStep):
        # Draws from the global generator, runs the network, and leaves it in training mode.
        torch.randn(3)
        x = step.samples().x
        gradient = step.model.gradient(lambda p: step.model(p, x).sum(), step.theta)[1]
        step.model.module.train()

        arrays: dict = {
            "theta": step.theta.clone(),
            "start": step.start.clone(),
            "batch": step.batch,
            "slope": gradient.norm(),
        }

        # Overwrites what it was given.
        step.theta.zero_()
        step.start.zero_()
        return arrays | {"others": step.samples(0).y}

    def after_round(self, view: AnalysedRound) -> None:
        steps = [step for client in view.clients for step in view.steps(client)]
        view.log(steps=len(steps), moved=(view.after - view.before).norm())
        view.log_table("steps", {"client": [step.client for step in steps], "step": [step.step for step in steps]})
        view.after.zero_()


class KeepsOnSelf(Analysis):
    """Set an attribute on itself, which is refused."""

    def after_round(self, view: AnalysedRound) -> None:
        self.last = view.after


class FailsInStep(Analysis):
    """Multiply by a matrix of the wrong shape before each step."""

    def before_step(self, step: LocalStep):
        return {"x": step.theta @ torch.zeros(3)}


class FailsAfterRound(Analysis):
    """Raise after each analysed round."""

    def after_round(self, view: AnalysedRound) -> None:
        raise ValueError("this cannot be")


class WritesSummary(Analysis):
    """Summarise the file that it has written; fail if it is missing."""

    def after_round(self, view: AnalysedRound) -> None:
        (view.folder / "said.txt").write_text(f"{view.round} round")

    def summary(self, folder: Path, round: int) -> list[str]:
        return [(folder / "said.txt").read_text()]
