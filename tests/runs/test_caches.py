"""What a cache gives is what would be made without it, whatever ran before."""

from __future__ import annotations

import importlib
import random
import re
import sys
import types
from contextlib import nullcontext
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from raypfl.common.errors import ConfigError, MethodError
from raypfl.common.global_draws import refuse_unkeyed
from raypfl.data import IID, load_federated
from raypfl.data.datasets.raw_data import RawData
from raypfl.data.datasets.settings import DataConfig
from raypfl.engine.events import Warned
from raypfl.experiment import Experiment
from raypfl.runs.choices.pretraining import pretrain
from raypfl.runs.driver import run
from tests.support.runs import ON_RAY, experiment

BODY = {"data.pools": "{body: 0.3}", "model.pretrain": "body", "model.pretrain_epochs": 1}

CHANGES = [
    *("data.augmentation=[flip]", "data.augmentation=[{name: crop, padding: 1}]", "training.precision=bf16"),
    *("model.pretrain_lr=0.01", "model.hidden=[5]", "seed=1", "engine.threads_for_server=2", "partition.alpha=9"),
    *("training.channels_last=true", "training.lr=0.5", "rounds=3", "evaluation.batch_size=7"),
]
"""Changes of one setting: some decide the pretrained weights, and some do not."""


def body_of(cache: Path, *changes: str) -> dict[str, torch.Tensor]:
    words = [f"{key}={value}" for key, value in {**BODY, "data.cache": cache}.items()]
    return load_file(pretrain(Experiment().override([*words, *changes]), lambda event: None).path)


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache in which the network was pretrained before, with all settings at their defaults."""
    cache = tmp_path_factory.mktemp("used")
    body_of(cache)
    return cache


@pytest.mark.parametrize("change", CHANGES)
def test_a_pretrained_network_does_not_depend_on_what_ran_before(used: Path, tmp_path: Path, change: str):
    from_used_cache = body_of(used, change)
    from_new_cache = body_of(tmp_path, change)

    assert from_used_cache.keys() == from_new_cache.keys()
    for name, tensor in from_new_cache.items():
        assert torch.equal(from_used_cache[name], tensor)


def test_a_users_network_is_pretrained_again_when_its_code_changes(tmp_path: Path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    code = """
        from torch import nn

        class MyNet(nn.Sequential):
            def __init__(self, input_shape, num_classes):
                super().__init__(nn.Flatten(), nn.Linear(64, 4), nn.ACTIVATION(), nn.Linear(4, num_classes))
    """
    bodies = []
    # Of different length: Python takes a file of the same second and size for the one that it has compiled.
    for activation in ("ReLU", "Sigmoid"):
        (tmp_path / "my_net.py").write_text(dedent(code).replace("ACTIVATION", activation))
        sys.modules.pop("my_net", None)
        network = "model={name: 'my_net:MyNet', pretrain: body, pretrain_epochs: 1}"
        bodies.append(body_of(tmp_path / "cache", network))
    assert not torch.equal(bodies[0]["1.weight"], bodies[1]["1.weight"])


def test_a_module_that_imports_random_later_is_checked_again(monkeypatch):
    """A notebook's cell may import `random` after a method of the notebook has run once."""
    notebook = types.ModuleType("my_notebook")
    monkeypatch.setitem(sys.modules, notebook.__name__, notebook)
    exec("class Mine:\n    def round(self):\n        return random.random()", notebook.__dict__)
    function = notebook.Mine().round

    for imported in (False, True):
        if imported:
            exec("import random", notebook.__dict__)
        refused = pytest.raises(MethodError, match="Python's global random stream") if imported else nullcontext()
        with refused, refuse_unkeyed(function, torch.device("cpu"), "a generator"):
            random.random()


def by_share(config: DataConfig) -> RawData:
    """A reader whose samples depend on a setting that is not the reader's: the test fraction."""
    inputs = np.full((40, 2), getattr(config, "test_fraction", 0.0), dtype=np.float32)
    return RawData(inputs, np.arange(40) % 2, ["a", "b"])


def test_prepared_samples_do_not_depend_on_what_ran_before(tmp_path: Path):
    def first(cache: str, share: float) -> float:
        data = Experiment(data={"name": f"{__name__}:by_share", "test_fraction": share}).data
        return float(load_federated(data, IID(clients=2), seed=0, cache=tmp_path / cache).inputs[0, 0])

    first("used", 0.25)
    assert first("used", 0.5) == first("new", 0.5)


def test_samples_are_prepared_again_once_edited_code_of_their_reader_is_imported(tmp_path: Path, monkeypatch):
    package = tmp_path / "own_reader"
    (package / "tools").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "readers.py").write_text(
        dedent("""
            import numpy as np
            from raypfl.data.datasets.raw_data import RawData

            from .tools import scaled

            def numbers(config):
                return RawData(scaled.inputs(), np.arange(40) % 2, ["a", "b"])
        """)
    )
    (package / "tools/__init__.py").write_text("from own_reader.tools import scaled\n")
    monkeypatch.syspath_prepend(tmp_path)

    def first_after(factor: float, in_new_process: bool = True) -> float:
        code = f"import numpy as np\n\ndef inputs():\n    return np.full((40, 2), {factor}, dtype=np.float32)\n"
        (package / "tools/scaled.py").write_text(code)
        for name in [name for name in sys.modules if name.startswith("own_reader") and in_new_process]:
            monkeypatch.delitem(sys.modules, name)
        data = Experiment(data={"name": "own_reader.readers:numbers"}).data
        return float(load_federated(data, IID(clients=2), seed=0, cache=tmp_path / "cache").inputs[0, 0])

    assert first_after(1.0) == 1.0
    assert first_after(20.0, in_new_process=False) == 1.0, "of the code in memory"
    assert first_after(20.0) == 20.0


def test_a_folder_of_images_is_read_again_from_the_folder_above(tmp_path: Path):
    for label in ("cat", "dog"):
        folder = tmp_path / "top" / "pets" / label
        folder.mkdir(parents=True)
        for i in range(4):
            Image.fromarray(np.full((4, 4, 3), i, dtype=np.uint8)).save(folder / f"{i}.png")

    def classes(root: str, cache: str) -> list[str]:
        data = Experiment(data={"name": "image_folder", "root": str(tmp_path / root), "size": 4}).data
        return load_federated(data, IID(clients=2), seed=0, cache=tmp_path / cache).class_names

    assert classes("top/pets", "used") == ["cat", "dog"]
    assert classes("top", "used") == classes("top", "new")


def test_a_method_that_was_edited_after_its_import_is_told_of_and_refused_where_ray_would_import_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(tmp_path)
    code = "from raypfl.methods import FedAvg\n\nclass Mine(FedAvg):\n    pass\n"
    (tmp_path / "method_of_a_notebook.py").write_text(code)

    def warnings_and_code(**changes: str) -> tuple[list[str], str]:
        warnings = []
        events = [lambda event: warnings.append(event.text) if isinstance(event, Warned) else None]
        described = experiment(tmp_path, method="method_of_a_notebook:Mine", rounds=1, **changes)
        result = run(described, listeners=events)
        return warnings, result.metadata["code"]["method_of_a_notebook"]

    warnings, first_code = warnings_and_code()
    assert not warnings

    (tmp_path / "method_of_a_notebook.py").write_text(code + "\n    weighting = 'uniform'\n")
    edited = r"^method_of_a_notebook\.py: edited since this Python process imported it"
    (warning,), same_code = warnings_and_code()
    assert re.match(edited, warning) and same_code == first_code
    with pytest.raises(ConfigError, match=rf"{edited}.*restart Python"):
        warnings_and_code(**ON_RAY)

    importlib.reload(sys.modules["method_of_a_notebook"])
    warnings, new_code = warnings_and_code()
    assert not warnings and new_code != first_code
