"""The core needs torch and NumPy alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

ABSENT = (
    "ray pydantic pyarrow mlflow torchvision sklearn scipy pandas rich typer yaml matplotlib PIL optuna safetensors"
)

PROGRAM = """
import importlib
import pkgutil
import sys

ABSENT = {absent!r}.split()
COMPILER = {{"torch._dynamo", "sympy"}}

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
ROOMS = (
    "common models models.architectures learning learning.optimizers learning.objectives evaluation clients devices "
    "federation federation.exchange methods"
)
for room in ROOMS.split():
    package = importlib.import_module("raypfl." + room)
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"raypfl.{{room}}.{{module.name}}")

from dataclasses import replace

import torch

import raypfl
from raypfl.learning.recording import Replays
from raypfl.methods import Ditto
from tests.support.federation import FP64, Federation

for name in "Batch Broadcast Each FlatModel METHODS MODELS Mean Method Scatter Sum Task per_client".split():
    getattr(raypfl, name)
training = replace(FP64, momentum=0.9, steps=5)
for executor in ("vectorised", "sequential"):
    federation = Federation(method=Ditto(), executor=executor, group_size=2, training=training)
    federation.context.executor.recorder = Replays()
    theta = federation.run_rounds(None, [0, 2])["theta"]
    assert torch.isfinite(theta).all() and not torch.equal(theta, federation.model.init(federation.seed))
assert not [name for name in sys.modules if name.partition(".")[0] in ABSENT]
assert not COMPILER & set(sys.modules)
print("trained")
"""


def test_the_core_is_imported_and_trains_without_ray_pydantic_and_the_rest_and_without_torchs_compiler():
    command = [sys.executable, "-c", PROGRAM.format(absent=ABSENT)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "trained\n"
