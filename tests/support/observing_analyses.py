"""Analyses for tests."""

from __future__ import annotations

from math import prod
from pathlib import Path

import torch
from torch import nn

from raypfl.analysis import AnalysedRound, Analysis, LocalStep


def dropping(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """A network that draws in training mode, with batch norm."""
    first = [nn.Flatten(), nn.Linear(prod(input_shape), 8), nn.BatchNorm1d(8)]
    return nn.Sequential(*first, nn.Dropout(0.4), nn.Linear(8, num_classes))


class Everything(Analysis):
    """Keeps all that a step shows, and does what could disturb training."""

    def start(self, view: AnalysedRound) -> None:
        assert view.round == 0 and torch.equal(view.before, view.after)
        view.log(norm=view.after.norm())

    def before_step(self, step: LocalStep):
        torch.randn(3)
        x = step.samples().x
        slope = step.model.gradient(lambda p: step.model(p, x).sum(), step.theta)[1]
        step.model.module.train()
        kept: dict = {
            "theta": step.theta.clone(),
            "start": step.start.clone(),
            "batch": step.batch,
            "slope": slope.norm(),
        }
        step.theta.zero_()
        step.start.zero_()
        return kept | {"others": step.samples(0).y}

    def after_round(self, view: AnalysedRound) -> None:
        kept = [one for client in view.clients for one in view.steps(client)]
        view.log(steps=len(kept), moved=(view.after - view.before).norm())
        view.log_table("steps", {"client": [one.client for one in kept], "step": [one.step for one in kept]})
        view.after.zero_()


class Remembers(Analysis):
    def after_round(self, view: AnalysedRound) -> None:
        self.last = view.after


class Stumbles(Analysis):
    def before_step(self, step: LocalStep):
        return {"x": step.theta @ torch.zeros(3)}


class Refuses(Analysis):
    def after_round(self, view: AnalysedRound) -> None:
        raise ValueError("this cannot be")


class Talks(Analysis):
    """Says what it has written."""

    def after_round(self, view: AnalysedRound) -> None:
        (view.folder / "said.txt").write_text(f"{view.round} round")

    def summary(self, folder: Path, round: int) -> list[str]:
        return [(folder / "said.txt").read_text()]
