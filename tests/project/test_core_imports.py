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
from raypfl.methods import Ditto
from tests.support.federation import FP64, Federation

for name in "Batch Broadcast Each FlatModel METHODS MODELS Mean Method Scatter Sum Task per_client".split():
    getattr(raypfl, name)
training = replace(FP64, momentum=0.9, steps=5)
for executor in ("vectorised", "sequential"):
    federation = Federation(method=Ditto(), executor=executor, group_size=2, training=training)
    theta = federation.run_rounds(None, [0, 2])["theta"]
    assert torch.isfinite(theta).all() and not torch.equal(theta, federation.model.init(federation.seed))
assert not [name for name in sys.modules if name.partition(".")[0] in ABSENT]
print("trained")
"""


def run_python(program: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a fresh interpreter, which has imported nothing yet."""
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_the_core_is_imported_and_trains_without_ray_pydantic_and_the_rest():
    result = run_python(PROGRAM.format(absent=ABSENT))
    assert result.returncode == 0, result.stderr
    assert result.stdout == "trained\n"


def test_the_core_in_a_bare_run_imports_neither_torchs_compiler_nor_sympy():
    program = (
        "import sys\n"
        "from raypfl.learning.recording import Replays\n"
        "from raypfl.methods import Ditto\n"
        "from tests.support.federation import Federation\n"
        "Replays.fewest = 2\n"
        "federation = Federation(method=Ditto(), group_size=2)\n"
        "federation.context.executor.recorder = Replays()\n"
        "federation.run_rounds(None)\n"
        "assert not {'torch._dynamo', 'sympy'} & set(sys.modules)\n"
    )
    result = run_python(program)
    assert result.returncode == 0, result.stderr
