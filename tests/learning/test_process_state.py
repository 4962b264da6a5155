"""Random streams of a process in which several runs take turns."""

from __future__ import annotations

import random

import numpy as np
import torch

from raypfl.learning.packing.process_state import ProcessState

# NumPy draws normal numbers in pairs and keeps the second one, which its generator's bits do not show.
DRAWS = {
    "normal": lambda: np.random.normal(),
    "uniform": lambda: np.random.random(),
    "torch": lambda: torch.rand(()).item(),
    "Python": lambda: random.gauss(0, 1),
    "nothing": lambda: None,
}


def seed_all(seed: int) -> None:
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    random.seed(seed)


def test_each_run_draws_what_it_draws_alone_whoever_has_a_turn_between():
    chosen = random.Random(0)
    turns = [(chosen.randrange(3), chosen.choice(list(DRAWS))) for _ in range(500)]
    before = ProcessState()
    try:
        alone = {}
        states = {}
        for run in range(3):
            seed_all(run)
            states[run] = ProcessState()
            alone[run] = [DRAWS[draw]() for active, draw in turns if active == run]

        together = {run: [] for run in range(3)}
        for run, draw in turns:
            states[run].restore()
            together[run].append(DRAWS[draw]())
            states[run] = ProcessState()
        assert together == alone
    finally:
        before.restore()
