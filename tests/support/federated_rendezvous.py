"""A method whose groups wait for each other: no round ends unless all of its groups run at once."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from raypfl.common.messages import Sum
from raypfl.methods import Method


class Rendezvous(Method):
    """Let every group of a round wait until `groups` groups are at work.

    Attributes
    ----------
    marks : folder in which each group leaves a file when it arrives.
    groups : number of groups to wait for.
    patience : seconds until a waiting group raises.
    """

    marks: str = ""
    groups: int = 1
    patience: float = 60.0

    def start(self, task):
        return {"met": 0}

    def round(self, server, cohort):
        server["met"] += int(cohort.run(self.meet)["met"])

    def global_model(self, server):
        return None

    def meet(self, clients):
        folder = Path(self.marks) / str(clients.round)
        folder.mkdir(exist_ok=True)
        (folder / f"{clients.ids[0]}-{os.getpid()}").touch()

        deadline = time.monotonic() + self.patience
        while len(list(folder.iterdir())) < self.groups:
            if time.monotonic() > deadline:
                raise TimeoutError(f"only {len(list(folder.iterdir()))} of {self.groups} groups run at a time")
            time.sleep(0.01)

        return {"met": Sum(torch.ones(len(clients)))}
