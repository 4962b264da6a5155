"""Every code block of the documentation runs or, where that needs a cluster or files, is accepted by its program."""

from __future__ import annotations

import contextlib
import functools
import io
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pyarrow.compute as pc
import pytest
import torch
import yaml
from typer.testing import CliRunner

import raypfl
from raypfl.cli.app import app
from raypfl.experiment import experiments
from raypfl.experiment.recipes import RECIPES, settings_of
from raypfl.integrations.tuning import sweep
from raypfl.integrations.tuning.checks.fit import refuse_unfit
from raypfl.studies import cells, description
from raypfl.studies.search import trials
from raypfl.trained.membership import membership
from tests.support.federation import Federation
from tests.support.pages import BLOCKS, READER_FILES, ROOT, Block, blocks, shell_lines, write_files
from tests.support.tiers import with_quick
from tests.support.tracking import forget_mlflow_settings, with_database

NOT_CODE = {"text", "toml"}  # tests/common/test_plugins.py installs what the only block of TOML describes
NOT_RUN = {
    "aws": "needs an account",
    "export": "changes the shell",
    "kubectl": "needs a Kubernetes cluster; tests/cluster/test_launchers.py checks its files",
    "mlflow": "serves until it is stopped",
    "nvidia-cuda-mps-control": "needs a GPU",
    "pip": "changes the environment; tests/project/test_packaging.py checks the extras",
    "podman": "builds an image of gigabytes; tests/cluster/test_launchers.py checks its file",
    "python": "as pip",
    "source": "changes the shell",
    "umask": "changes the shell",
}
"""Programs whose lines are not run, and why."""


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory, mlflow_database: Path) -> Iterator[Path]:
    """A reader's folder, to work in."""
    folder = tmp_path_factory.mktemp("reader")
    write_files(folder)
    with_database(folder / "runs", mlflow_database)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        forget_mlflow_settings(patch)
        yield folder
    for name in READER_FILES:
        sys.modules.pop(Path(name).stem, None)  # other tests have modules of these names


# Python


def quick(experiment: Any, **options: Any) -> raypfl.Result:
    """`raypfl.run`, in this process and for two rounds at most."""
    rounds = min(2, experiment.rounds)
    return run(experiment.override(["engine.backend=inline", f"rounds={rounds}"]), **options)


run = raypfl.run  # which pages get replaced by `quick`


def run_method(method: str, **changes: Any) -> raypfl.Result:
    return quick(raypfl.Experiment(method=method, **changes))


def names_for_fednh() -> dict[str, Any]:
    recorded = {"checkpoint": {"every": 1, "keep": 2}, "tracking": {"latent": True}}
    return {"result": run_method("fednh", rounds=2, cohort={"fraction": 0.5}, **recorded)}


def names_for_fedptr() -> dict[str, Any]:
    return {"result": run_method("fedavg", rounds=1, data={"pools": {"unused": 0.9}}, partition={"clients": 5})}


def names_for_new_clients() -> dict[str, Any]:
    result = run_method("fedavg-ft", rounds=1)
    x = np.zeros((8, 1, 8, 8), np.uint8)
    y = np.arange(8) % 2
    network = raypfl.trained_models(result.run_dir).global_model().network
    return {"result": result, "x": x, "y": y, "network": network, "token": "secret"}


def names_for_data() -> dict[str, Any]:
    """No names; the page reads the run, whose clients are cities, from its folder."""
    rows = [f"{20 + row},{row % 2},{('Aachen', 'Berlin', 'Cottbus')[row % 3]}" for row in range(60)]
    Path("people").mkdir()
    Path("people/people.csv").write_text("\n".join(["age,bought,city", *rows]))
    table = {"name": "table", "root": "people", "target": "bought", "group": "city"}
    experiment = raypfl.Experiment(method="ditto", rounds=1, data=table, partition="by_column")
    quick(experiment, run_dir="runs/...")
    return {}


def names_for_pefll() -> dict[str, Any]:
    """No names; the page reads the run from its folder."""
    experiment, *_ = experiments(settings_of("pefll-digits"), ["methods=[pefll]", "seeds=1", "rounds=1"])
    quick(experiment, run_dir="runs/pefll-digits-.../pefll-s0")
    return {}


NAMES_BEFORE: dict[str, Callable[[], dict[str, Any]]] = {
    "docs/data.md": names_for_data,
    "docs/fednh.md": names_for_fednh,
    "docs/fedptr.md": names_for_fedptr,
    "docs/new_clients.md": names_for_new_clients,
    "docs/pefll.md": names_for_pefll,
}
"""Page -> the names that its reader has before the first block."""


class LocalService:
    """A stand-in for the page's service; it has the model that the page made in Python before."""

    about: ClassVar[dict[str, Any]] = {"class_names": list("0123456789")}

    def __init__(self, address: str, token: str):
        assert token == "secret"

    def personalize(self, x: np.ndarray, y: np.ndarray, file: str) -> Any:
        return raypfl.load_model(file)


def post(url: str, json: dict[str, Any], headers: dict[str, str]) -> SimpleNamespace:
    """A stand-in for `requests.post`: the predictions of the page's service."""
    assert url.endswith("/predict") and headers["Authorization"] == "Bearer secret"
    return SimpleNamespace(ok=True, json=lambda: {"predictions": ["3"] * len(json["inputs"])})


@pytest.fixture(scope="module")
def ran(reader: Path) -> Callable[[str], SimpleNamespace]:
    """A function that runs a page's Python once, from top to bottom; returns its names and what it printed."""

    import mlflow

    @functools.cache
    def run_page(page: str) -> SimpleNamespace:
        module = ModuleType(re.sub(r"\W", "_", page))
        printed = io.StringIO()
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
            sys.modules[module.__name__] = module
            patch.setattr(raypfl, "run", quick, raising=False)
            patch.setattr("requests.post", post)
            patch.setattr("raypfl.trained.serving.remote.RemoteRun", LocalService)
            patch.setattr("raypfl.trained.membership.membership", functools.partial(membership, epochs=1))
            vars(module).update(NAMES_BEFORE.get(page, dict)())
            try:
                for code in blocks(page, "python"):
                    exec(compile(code, page, "exec"), vars(module))
            finally:
                mlflow.set_tracking_uri(None)  # a page sets it for the whole process
        return SimpleNamespace(names=vars(module), printed=printed.getvalue())

    return run_page


PYTHON_PAGES = dict.fromkeys(block.page for block in BLOCKS if block.language == "python")


@pytest.mark.parametrize("page", with_quick(PYTHON_PAGES, {"README.md"}))
def test_the_python_of_a_page_runs_from_top_to_bottom(ran, page: str):
    assert ran(page)


def test_the_readmes_python_prints_what_it_says(ran):
    printed = ran("README.md").printed
    assert "local  personal" in printed and "torch.Size([9610])" in printed


@pytest.mark.thorough
def test_the_guide_to_tracking_finds_its_runs_and_models(ran):
    printed = ran("docs/tracking.md").printed
    assert printed.count("torch.Size([5, 10])") == 3 and "tags.seed" in printed


def test_the_page_on_fednh_selects_the_clients_of_the_last_round(ran):
    names = ran("docs/fednh.md").names
    result = names["result"]
    active = names["active"]

    cohort = result.rounds["cohort"].to_pylist()[-1]
    last = [row for row in result.evaluations.to_pylist() if row["round"] == 2 and row["model"] == "personal"]
    expected = [row["accuracy"] for row in last if row["client"] in cohort and row["protocol"] == "local"]
    assert active.filter(pc.field("protocol") == "local")["accuracy"].to_pylist() == expected
    assert 0 < len(expected) < len({row["client"] for row in last})


def test_the_scale_of_fednh_is_read_as_the_page_says(ran):
    names = ran("docs/fednh.md").names
    (scale,) = names["scale"].values()
    assert scale == names["result"].global_model()[-1].item()
    assert [round for round, _ in names["by_round"]] == [1, 2] and names["by_round"][-1][1] == scale
    assert 0 < abs(scale - 30) < 5  # it was trained


def test_a_model_for_a_new_client_is_in_its_file_as_the_page_says(ran):
    names = ran("docs/new_clients.md").names
    with torch.no_grad():
        assert torch.allclose(names["logits"], names["made"].model(torch.from_numpy(names["x"])))


def test_the_rules_of_the_guide_to_optimizers_train(ran):
    rules = ran("docs/optimizers.md").names
    clients = Federation().clients()

    initial_loss = clients.evaluate(clients.initial, "train")["loss"].sum()
    for rule in (rules["Lion"](), rules["Private"](norm=0.5, noise=0.01)):
        trained = clients.sgd(clients.loss, clients.initial, optimizer=rule, lr=0.02, epochs=5)
        assert clients.evaluate(trained, "train")["loss"].sum() < initial_loss


# Descriptions


def alternatives(block: Block) -> list[str]:
    """A block's descriptions: the whole block or, if a key is on several lines, each line."""
    keys = re.findall(r"^(\w+):", block.code, re.MULTILINE)
    return [block.code] if len(keys) == len(set(keys)) else block.code.splitlines()


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "yaml"], ids=lambda block: block.name)
def test_a_description_on_a_page_is_accepted(reader: Path, block: Block):
    for text in alternatives(block):
        described = yaml.safe_load(text)
        if {"extends", "metrics"} & described.keys():
            (reader / "shown.yaml").write_text(text)
            assert cells.plan(description.load("shown.yaml")[0])
        elif "search" in described:
            whole = yaml.safe_load(blocks(block.page, "yaml")[0])
            refuse_unfit(sweep.load({**whole, "name": "shown", **described}))
        else:
            assert experiments(described)


def test_every_block_is_in_a_language_that_is_checked():
    assert {block.language for block in BLOCKS} == {"", "python", "yaml", *NOT_CODE}


# The shell


NOT_DONE = (
    *("cli.actions.run.run_experiments", "cli.actions.run.resume_folder", "cli.actions.run.continue_as_new"),
    *("cli.actions.pretrain.carry_out", "cli.actions.jobs.submit", "cli.actions.plan.carry_out"),
    *("cli.actions.personalize.personalize", "cli.actions.personalize.serve", "integrations.tracking.listener.track"),
    *("experiment.Experiment.load_data", "data.summarised", "results.client_data.draw", "results.client_data.show"),
    *("results.report.write", "cli.actions.predict.predict"),
)
"""Functions that would do what a page's command asks for."""


@pytest.fixture(scope="module")
def accepted(reader: Path) -> Iterator[Callable[[list[str]], bool]]:
    """A function that holds words to `raypfl`'s command line; descriptions are read and nothing is run."""

    def read_sweep(source: str, changes: list[str], *rest: Any) -> None:
        refuse_unfit(sweep.load(source, changes))

    def read_study(source: str, only: list[str], changes: list[str], *rest: Any) -> None:
        study, other_changes = trials.with_search(description.load(source)[0], changes)
        cells.plan(cells.select(study, only), other_changes)

    def read_recipe(source: str, changes: list[str], *rest: Any) -> None:
        assert source == "RUN" or (source in RECIPES and experiments(settings_of(source), changes))

    def do_nothing(*words: Any, **options: Any) -> Any:
        return 0

    def is_accepted(words: list[str]) -> bool:
        result = CliRunner().invoke(app, words, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raypfl.cli.actions.tune.carry_out", read_sweep)
        patch.setattr("raypfl.cli.actions.study.run_study", read_study)
        patch.setattr("raypfl.cli.actions.ntk.ntk", read_recipe)
        for name in NOT_DONE:
            patch.setattr(f"raypfl.{name}", do_nothing)
        patch.setattr("raypfl.results.report.find_runs", lambda runs: ([], []))
        yield is_accepted


@pytest.mark.parametrize("words", shell_lines(), ids=" ".join)
def test_a_command_on_a_page_is_accepted_by_its_program(accepted, words: list[str]):
    program, rest = words[0].lstrip("("), words[1:]
    if program == "raypfl":
        assert accepted(rest)
    elif program == "make":
        targets = re.search(r"^\.PHONY: (.*)$", Path("Makefile").read_text(), re.MULTILINE)[1].split()
        assert {word for word in rest if "=" not in word} <= set(targets)
    elif program == "ray":
        assert is_accepted_by_ray(rest)
        assert all(accepted(word.split()[1:]) for word in rest if word.startswith("raypfl "))
    elif program == "sbatch":
        assert accepted(rest[rest.index("cluster/slurm.sh") + 1 :])
    elif program == "bash":
        assert (ROOT / rest[0]).is_file()
    else:
        assert program in NOT_RUN


def is_accepted_by_ray(words: list[str]) -> bool:
    from ray.scripts.scripts import cli

    name, *rest = words
    return bool(cli.commands[name].make_context(name, rest, resilient_parsing=True))


def test_every_file_of_the_repository_that_a_command_names_is_there():
    words = " ".join(" ".join(line) for line in shell_lines())
    named = set(re.findall(r"(?<!\S)(?:cluster|tune_configs|\.ci)/[\w./-]+", words))
    assert len(named) > 5 and not [name for name in named if not (ROOT / name).is_file()]


@pytest.mark.parametrize("page", dict.fromkeys(block.page for block in BLOCKS if not block.language))
def test_the_shell_can_read_all_commands_of_a_page(page: str):
    result = subprocess.run(["bash", "-n"], input="".join(blocks(page, "")), text=True, capture_output=True)
    assert not result.returncode, result.stderr
