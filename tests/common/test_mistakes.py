"""Error messages for a method's author: the mistake, its line in the author's file, and how to mend it."""

from __future__ import annotations

import re
import sys
from dataclasses import FrozenInstanceError, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import raypfl
from raypfl import MODELS, Experiment, Mean, Method
from raypfl.common.errors import CheckpointError, ConfigError, RaypflError
from raypfl.data import Partition
from raypfl.data.partitions.partition import IID, Traits
from raypfl.engine.events import Event, RoundFinished, RunFinished, RunStarted, Warned
from raypfl.experiment import experiments
from raypfl.learning.optimizers import SGD
from raypfl.methods import FedAvg
from raypfl.methods.personal_models.ditto import Ditto
from raypfl.runs import driver
from raypfl.runs.checks.hooks import refuse_mistaken_hooks
from tests.support import command, mistaken_methods
from tests.support.runs import ON_RAY, experiment

MODULE = "tests.support.mistaken_methods"
FILE = Path(mistaken_methods.__file__)


def line_of(text: str, after: str) -> int:
    """The first line below `after` that has `text`."""
    lines = FILE.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if after in line)
    return next(i for i, line in enumerate(lines[start:], start + 1) if text in line)


def error_of(tmp_path: Path, name: str, **changes) -> str:
    """The message with which a run of a mistaken method fails; no line of it is raypfl's."""
    # Measured executors would make groups, and so messages, depend on the machine.
    always = {"evaluation__every": 1, "engine__executor": "vectorised"}
    with pytest.raises(RaypflError) as caught:
        raypfl.run(experiment(tmp_path, method=f"{MODULE}:{name}", **(always | changes)))
    text = str(caught.value)
    assert str(Path(raypfl.__file__).parent) not in text
    return text


@pytest.mark.parametrize(
    ("name", "owner", "returned"),
    [
        ("ForgetsToReturn", "ForgetsToReturn", "returned nothing"),
        ("ReturnsAnotherKey", "ReturnsAnotherKey", "returned 'model'"),
        ("MistypesInRound", "Base", "returned 'theta'"),
    ],
)
def test_a_missing_reply_is_reported_with_what_the_clients_returned(tmp_path, name, owner, returned):
    text = error_of(tmp_path, name)
    function = f"{owner}.train (mistaken_methods.py, line {line_of('def train', f'class {owner}')})"
    entry = "thta" if name == "MistypesInRound" else "theta"
    assert f"{function} {returned}; there is no {entry!r}" in text
    reader = "MistypesInRound" if name == "MistypesInRound" else "Base"
    assert f'File "{FILE}", line {line_of("cohort.run", f"class {reader}")}, in {reader}.round' in text


def test_a_reply_that_is_no_dict_is_reported_with_the_function(tmp_path):
    text = error_of(tmp_path, "ReturnsNoDict")
    assert "ReturnsNoDict.train (mistaken_methods.py, line" in text and "returned a Mean; it must return a dict" in text


def test_a_method_without_a_model_to_judge_is_refused_before_the_first_round(tmp_path):
    events = []
    with pytest.raises(ConfigError, match=r"NoModel has no model to evaluate.*define global_model.*personal_model"):
        raypfl.run(experiment(tmp_path, method=f"{MODULE}:NoModel"), listeners=[events.append])
    assert not [event for event in events if isinstance(event, RoundFinished)]


def test_a_model_of_the_wrong_shape_is_its_functions_fault_and_no_clients(tmp_path):
    text = error_of(tmp_path, "ShortGlobalModel")
    line = line_of("def global_model", "class ShortGlobalModel")
    assert text.startswith(f"ShortGlobalModel.global_model (mistaken_methods.py, line {line}) returned [100]")
    assert "[1210]" in text and "lient" not in text.splitlines()[0]
    text = error_of(tmp_path, "ShortPersonalModels")
    assert text.startswith("ShortPersonalModels.personal_model (mistaken_methods.py, line")
    assert "returned [3, 1210]" in text and "[2, 1210]" in text


def test_a_model_of_the_wrong_shape_is_refused_before_the_first_round(tmp_path):
    events = []
    wrong = experiment(tmp_path, method=f"{MODULE}:ShortPersonalModels", engine__executor="vectorised")
    with pytest.raises(ConfigError, match=r"ShortPersonalModels\.personal_model .* returned \[3, 1210\].*\[2, 1210\]"):
        raypfl.run(wrong, listeners=[events.append])
    assert not [event for event in events if isinstance(event, RoundFinished)]


def test_a_mistake_in_a_client_function_is_tried_once_and_shown_by_the_authors_lines_only(tmp_path):
    first, *rest = error_of(tmp_path, "RaisesInTrain", engine__group_size=6).splitlines()
    assert first.startswith("All 6 clients of a group failed in round 1 (") and "and 1 more" in first
    assert rest[-1] == "AttributeError: 'RaisesInTrain' object has no attribute 'mu'"
    places = [line.split(", ")[1:] for line in rest if line.startswith("  File")]
    assert places[0] == [f"line {line_of('clients.sgd', 'class RaisesInTrain')}", "in RaisesInTrain.train"]
    assert places[-1][0] == f"line {line_of('lambda', 'class RaisesInTrain')}" and len(places) == 2


def test_a_shape_that_torch_refuses_is_tried_once_and_shown_by_its_line(tmp_path):
    text = error_of(tmp_path, "RaisesInTorch")
    assert text.startswith("All 2 clients of a group failed in round 1")
    assert "in RaisesInTorch.train" in text and "@ torch.zeros(3, 3)" in text


def test_setting_an_attribute_of_the_method_is_refused_with_where_state_belongs(tmp_path):
    text = error_of(tmp_path, "KeepsOnSelf")
    assert "KeepsOnSelf.last cannot be set" in text
    assert 'clients.state["last"]' in text and 'server["last"]' in text
    assert f"line {line_of('self.last', 'class KeepsOnSelf')}, in KeepsOnSelf.train" in text


def test_an_error_on_the_server_names_what_the_clients_returned(tmp_path):
    line = line_of("def train", "class SendsTooLittle")
    function = f"SendsTooLittle.train (mistaken_methods.py, line {line})"
    for optimizer in ("adam", "sgd"):
        changes = {"method__server_optimizer": optimizer, "evaluation__every": 1}
        with pytest.raises(RaypflError) as caught:
            raypfl.run(experiment(tmp_path, method=f"{MODULE}:SendsTooLittle", **changes))
        assert f"{function} got theta [1210] and returned theta [1207]." in str(caught.value)


def test_models_with_nan_or_infinity_are_refused_where_they_are_made(tmp_path):
    # In the last round, nobody would train from the new model: it would be tested as one that guesses.
    line = line_of("def train", "class TakesALogarithm")
    function = f"TakesALogarithm.train (mistaken_methods.py, line {line})"
    for changes in ({}, {"privacy__secure_aggregation": True}):
        text = error_of(tmp_path, "TakesALogarithm", rounds=1, **changes)
        assert re.search(re.escape(f"{function} returned 'theta' with nan or infinity for client ") + r"\d", text)

    line = line_of("def personal_model", "class DividesByZero")
    function = f"DividesByZero.personal_model (mistaken_methods.py, line {line})"
    text = error_of(tmp_path, "DividesByZero", rounds=1)
    assert f"{function} returned a model with nan or infinity for client 0." in text


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "SendsNumPy",
            "SendsNumPy.train (mistaken_methods.py, line {}) returned 'theta' as Mean of a ndarray",
        ),
        ("KeepsANumber", "clients.state['share'] is set to a float; store a tensor with a row for each client"),
        (
            "DefaultsToANumber",
            "The default of clients.state.get is a float; give it a tensor, such as torch.tensor(0.5)",
        ),
        (
            "PersonalInNumPy",
            "PersonalInNumPy.personal_model (mistaken_methods.py, line {}) returned a ndarray",
        ),
    ],
)
def test_what_is_no_tensor_is_refused_where_it_is_made(tmp_path, name, message):
    line = line_of("def ", f"class {name}(")
    assert message.format(line) in error_of(tmp_path, name)


def test_a_personal_model_without_return_is_warned_of(tmp_path):
    events: list[Event] = []
    raypfl.run(experiment(tmp_path, method=f"{MODULE}:ReturnsNoModel", rounds=1), listeners=[events.append])
    warnings = [event.text for event in events if isinstance(event, Warned)]
    assert any("returned None, so only the global model was tested. Return" in text for text in warnings)


@pytest.mark.parametrize("group_size", [1, 12])
def test_models_for_some_clients_only_are_refused_however_clients_are_cut_into_groups(tmp_path, group_size):
    one_by_one = {"engine__executor": "sequential", "engine__group_size": group_size}
    text = error_of(tmp_path, "LacksADefault", rounds=1, **one_by_one)
    line = line_of("def personal_model", "class LacksADefault")
    assert f"LacksADefault.personal_model (mistaken_methods.py, line {line}) returned None for some clients" in text


def test_a_finite_model_whose_outputs_are_nan_is_warned_of(tmp_path):
    events: list[Event] = []
    raypfl.run(experiment(tmp_path, method=f"{MODULE}:Overflows", rounds=1), listeners=[events.append])
    warnings = [event.text for event in events if isinstance(event, Warned)]
    assert any("test outputs are nan for 1 model, such as the global model" in text for text in warnings)


@pytest.mark.parametrize(
    ("name", "mended"), [("SendsTooLittle", FedAvg), ("KeepsTooLittle", mistaken_methods.Base)], ids=str
)
def test_a_state_that_no_evaluation_can_use_is_not_saved_so_that_a_resume_works_once_the_method_is_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, mended: type[Method]
):
    wrong = experiment(tmp_path, method=f"{MODULE}:{name}", rounds=2, evaluation__every=1, checkpoint__every=1)
    with pytest.raises(RaypflError, match=r"returned \[.*1207\], which is no model of this network"):
        raypfl.run(wrong, run_dir=tmp_path / "run")

    monkeypatch.setattr(getattr(mistaken_methods, name), "train", mended.train)
    resumed = raypfl.resume(tmp_path / "run")
    assert resumed.round == 2 and resumed.weights_hash == raypfl.run(wrong).weights_hash


def test_a_hyperparameter_without_a_type_hint_is_refused_with_how_to_write_one():
    sentence = "LacksATypeHint has gamma, but without a type; write `gamma: float = 3.0` in the class"
    with pytest.raises(ConfigError) as caught:
        raypfl.Experiment(method={"name": f"{MODULE}:LacksATypeHint", "gamma": 1})
    assert sentence in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        experiments(f"method: {MODULE}:LacksATypeHint\n", ["method.gamma=1"])
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message", "line"),
    [
        ("import os\nfrom raypfl import Meen\n", "ImportError: cannot import name 'Meen' from 'raypfl'", 2),
        ("import no_such_library\n", "ModuleNotFoundError: No module named 'no_such_library'", 1),
        ("class Mine\n", "SyntaxError: expected ':'", 1),
        ("x = y\n", "NameError: name 'y' is not defined", 1),
    ],
)
def test_a_module_that_cannot_be_imported_is_reported_with_its_line(tmp_path, monkeypatch, source, message, line):
    (tmp_path / "wrong_inside.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "wrong_inside", raising=False)

    with pytest.raises(ConfigError) as caught:
        raypfl.Experiment(method="wrong_inside:Mine")

    text = str(caught.value)
    assert message in text and f'wrong_inside.py", line {line}' in text
    assert "PYTHONPATH" not in text and "raypfl/common/registry.py" not in text


def test_a_failed_import_is_one_mistake_in_the_list_with_its_traceback_below_it(tmp_path, monkeypatch):
    (tmp_path / "raises.py").write_text("x = y\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for setting in ("method", "data", "model", "partition"):
        with pytest.raises(ConfigError) as alone:
            raypfl.Experiment(**{setting: "raises:X"})
        assert "because its module raises an error:\n  File" in str(alone.value)
        assert str(alone.value).endswith("\nNameError: name 'y' is not defined")

        with pytest.raises(ConfigError) as beside:
            raypfl.Experiment(**{setting: "raises:X"}, rounds=0, training={"epochs": 0, "batch_size": 0})
        assert str(beside.value).startswith("The experiment has 4 mistakes:")
        bullets = [line for line in str(beside.value).splitlines()[1:] if line.startswith("  - ")]
        assert len(bullets) == 4 and "\n    NameError: name 'y'" in str(beside.value)


def test_a_missing_module_is_reported_with_pythonpath():
    with pytest.raises(ConfigError, match=r"No module named 'nowhere_at_all'.*PYTHONPATH"):
        raypfl.Experiment(method="nowhere_at_all:Mine")


def test_what_a_script_defines_and_another_process_looks_for_belongs_in_a_module():
    with pytest.raises(ConfigError, match=r"no other process can import .* name it 'my_file:OfAScript'\."):
        MODELS.get("__main__:OfAScript")


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("torch.nn:Module", r"unexpected keyword argument 'input_shape'.*: def __init__\(self, input_shape, num_c"),
        ({"name": "mlp", "hidden": [10**17]}, "overflowed"),
    ],
)
def test_a_network_that_cannot_be_built_is_refused_in_a_sentence(model: object, reason: str):
    with pytest.raises(ConfigError, match=rf"^model is .*, which cannot be built with input_shape=.*{reason}"):
        driver.check([Experiment(model=model)])


class Misfit(torch.nn.Module):
    """A network for eight numbers a sample, whatever the input shape."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int):
        super().__init__()
        self.head = torch.nn.Linear(8, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.flatten(1))


def test_a_network_that_does_not_fit_the_data_is_refused_with_its_line_before_anything_runs():
    with pytest.raises(ConfigError, match=r"'digits', whose shape is \(1, 8, 8\)\. RuntimeError: (?s:.*)self.head\(x"):
        driver.check([Experiment(model=f"{__name__}:Misfit")])


def test_a_methods_class_means_the_method_with_its_defaults():
    assert Experiment(method=Ditto) == Experiment(method="ditto")


def test_batch_norm_with_one_sample_says_which_setting_leaves_it_out(tmp_path: Path):
    skipping = {"training__batch_size": 1, "failures__on_client_failure": "skip"}
    alone = experiment(tmp_path, model="{name: resnet10, width: 4}", rounds=1, **skipping)
    with pytest.raises(RaypflError, match=r"Set training.smallest_batch=2, which leaves such batches out"):
        raypfl.run(alone)


def test_a_mini_batch_of_one_sample_is_refused_before_the_run_if_batch_norm_fails_on_it(tmp_path: Path):
    network = {"model": "{name: resnet10, width: 4}", "partition__min_samples": 10, "training__batch_size": 10}
    for changes, mend in [
        ({"training__batch_size": 1}, r"training\.batch_size is 1\. Raise it"),
        ({}, r"client \d+'s \d*1 training samples leave one in batches of 10\. Set training\.smallest_batch=2"),
    ]:
        with pytest.raises(ConfigError, match=rf"model is 'resnet10', whose batch norm .* {mend}"):
            driver.check([experiment(tmp_path, **(network | changes))])

    driver.check([experiment(tmp_path, **network, training__smallest_batch=2)])
    driver.check([experiment(tmp_path, **network, training__steps=1)])
    driver.check([experiment(tmp_path, model="{name: resnet10, width: 4, norm: group}", training__batch_size=1)])


class PerSample(SGD):
    """SGD that asks for the gradient of each sample."""

    per_sample = True


def test_an_optimizer_of_single_samples_is_refused_with_batch_norm_before_the_run(tmp_path: Path):
    network = {"model": "{name: resnet10, width: 4}", "training__optimizer": f"{__name__}:PerSample"}
    with pytest.raises(ConfigError, match=r"PerSample, which needs the gradient of each sample, but batch norm in res"):
        driver.check([experiment(tmp_path, **network)])
    driver.check([experiment(tmp_path, **(network | {"model": "{name: resnet10, width: 4, norm: group}"}))])


def test_checkpoints_that_cannot_be_read_do_not_hide_why_a_run_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def unreadable(*_: object) -> int:
        raise CheckpointError("The location is gone.")

    monkeypatch.setattr("raypfl.cli.actions.work.rounds_saved", unreadable)
    file = tmp_path / "alone.yaml"
    file.write_text(experiment(tmp_path, method=f"{MODULE}:RaisesInTrain").to_yaml())
    failed = command.raypfl("run", str(file))
    assert failed.exit_code == 1 and "no attribute 'mu'" in failed.output and "gone" not in failed.output
    assert "To continue" not in failed.output


def fails(*_: object, **__: object) -> None:
    raise KeyError("gone")


class FailsAtStart(mistaken_methods.Base):
    start = fails


class FailsInRound(mistaken_methods.Base):
    round = fails


class FailsInNetworks(mistaken_methods.Base):
    networks = fails


class FailsInCheck(mistaken_methods.Base):
    check = fails


class FailsWhenMade(mistaken_methods.Base):
    __post_init__ = fails


class FailsToDivide(Partition):
    owners = fails


@pytest.mark.thorough
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("place", [{}, ON_RAY], ids=["inline", "ray"])
def test_an_error_in_start_is_reported_by_function_line_and_error_on_both_backends(tmp_path: Path, place: dict):
    wrong = experiment(tmp_path, method=f"{__name__}:FailsAtStart", **place)
    with pytest.raises(RaypflError) as caught:
        raypfl.run(wrong)
    first, *lines = str(caught.value).splitlines()
    line = fails.__code__.co_firstlineno + 1
    assert first == f"fails (test_mistakes.py, line {line}) failed before round 1: KeyError: 'gone'"
    assert lines == [f'  File "{__file__}", line {line}, in fails', '    raise KeyError("gone")']


@pytest.mark.parametrize(
    "changes",
    [
        {"method": f"{__name__}:FailsInRound"},
        {"method": f"{__name__}:FailsInNetworks"},
        {"method": f"{__name__}:FailsInCheck"},
        {"method": f"{__name__}:FailsWhenMade"},
        {"partition": f"{__name__}:FailsToDivide"},
        {"data": f"{__name__}:fails"},
        {"model": f"{__name__}:fails"},
    ],
    ids=str,
)
def test_an_error_in_any_function_of_a_user_is_one_sentence_with_its_line(tmp_path: Path, changes: dict[str, str]):
    with pytest.raises(RaypflError) as caught:
        raypfl.run(experiment(tmp_path).replace(**changes))
    text = str(caught.value)
    assert "KeyError: 'gone'" in text.splitlines()[0] and len(text.splitlines()) <= 3
    assert f'File "{__file__}", line {fails.__code__.co_firstlineno + 1}, in fails' in text


@pytest.mark.parametrize("event", [RunStarted, RoundFinished, RunFinished])
def test_an_error_in_a_listener_is_not_blamed_on_the_method(tmp_path: Path, event: type):
    def listener(received: object) -> None:
        if isinstance(received, event):
            fails()

    with pytest.raises(RaypflError) as caught:
        raypfl.run(experiment(tmp_path, rounds=1), listeners=[listener])
    first = str(caught.value).splitlines()[0]
    assert "listener (test_mistakes.py, line " in first and first.endswith("KeyError: 'gone'") and "Ditto" not in first


def test_a_bug_of_raypfl_keeps_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Experiment, "load_data", {"a": 1}.__getitem__)
    with pytest.raises(TypeError):
        raypfl.run(experiment(tmp_path))


class StartsWithNothing(mistaken_methods.Base):
    def start(self, task):
        pass


class ReturnsItsState(mistaken_methods.Base):
    def round(self, server, cohort):
        return {"theta": cohort.run(self.train, theta=server["theta"])["theta"]}


class Awaited(mistaken_methods.Base):
    async def round(self, server, cohort):
        pass


class KeepsAnArray(mistaken_methods.Base):
    def round(self, server, cohort):
        server["theta"] = server["theta"].numpy()


class CutsTheModel(FedAvg):
    def round(self, server, cohort):
        server["theta"] = server["theta"][:5]


class WeighsNobody(mistaken_methods.Base):
    def train(self, clients, theta):
        return {"theta": Mean(clients.sgd(clients.loss, theta), weight=0 * clients.num_samples)}


class TakesOtherArguments(mistaken_methods.Base):
    def train(self, clients, weights):
        pass


class TakesNoCohort(mistaken_methods.Base):
    def round(self, server):
        pass


class TakesNoClients(mistaken_methods.Base):
    def personal_model(self, server):
        return server["theta"]


class MisspellsItsModel(mistaken_methods.Base):
    def personal_modell(self, clients, server):
        return server["theta"].expand(len(clients), -1)


class PredictsByItsOwn(mistaken_methods.Base):
    def personal_model(self, clients, server):
        return server["theta"].expand(len(clients), -1)


class MisspellsItsBases(PredictsByItsOwn):
    def personal_modle(self, clients, server):
        return server["theta"].expand(len(clients), -1)


class MisspellsFedAvgs(FedAvg):
    def trian(self, clients, theta):
        return super().train(clients, theta)


class MisspellsItsOnlyModel(Method):
    start = mistaken_methods.Base.start
    round = mistaken_methods.Base.round
    train = mistaken_methods.Base.train

    def global_modle(self, server):
        return server["theta"]


class CallsARoundAStart(mistaken_methods.Base):
    start: int = 3


class HasNoStart(Method):
    def global_model(self, server):
        return server["theta"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "StartsWithNothing",
            r"StartsWithNothing\.start .* returned nothing; it must return .* a dict",
        ),
        ("ReturnsItsState", r"ReturnsItsState\.round .* returned a dict; it must return nothing, and change"),
        ("Awaited", r"Awaited\.round .* returned a coroutine; it must return nothing"),
        (
            "KeepsAnArray",
            r"^After KeepsAnArray\.round \(test_mistakes\.py, line \d+\), the server state 'theta' is of type ndarray",
        ),
        (
            "CutsTheModel",
            r"^FedAvg\.global_model .* returned \[5\].* what CutsTheModel\.round \(test_mistakes\.py, line \d+\) l",
        ),
        (
            "WeighsNobody",
            r"^WeighsNobody\.train \(test_mistakes\.py, line \d+\) returned Mean 'theta' with weights that sum to 0",
        ),
        (
            "TakesOtherArguments",
            r"TakesOtherArguments\.train .* was called with \(clients, theta\), .* but takes other arguments",
        ),
        (
            "TakesNoCohort",
            r"^TakesNoCohort\.round \(test_mistakes\.py, line \d+\) is called with \(server, cohort\), but takes "
            r"\(server\); write round\(self, server, cohort\)\.$",
        ),
        ("TakesNoClients", r"^TakesNoClients\.personal_model .* but takes \(server\); write personal_model\(self, cl"),
        (
            "MisspellsItsModel",
            r"^MisspellsItsModel\.personal_modell \(test_mistakes\.py, line \d+\) is never called; did you mean "
            r"personal_model\(self, clients, server\)\?",
        ),
        (
            "MisspellsItsBases",
            r"^MisspellsItsBases\.personal_modle .* did you mean personal_model\(self, clients, server\)",
        ),
        (
            "MisspellsFedAvgs",
            r"^MisspellsFedAvgs\.trian .* never called; did you mean train\(self, clients, theta\)\?",
        ),
        ("MisspellsItsOnlyModel", r"global_modle .* did you mean global_model\(self, server\)\?"),
        ("CallsARoundAStart", r"^CallsARoundAStart\.start is 3, but must be the function start\(self, task\); call"),
        ("HasNoStart", r"^HasNoStart does not say how it starts: define start"),
    ],
)
@pytest.mark.filterwarnings("ignore:coroutine")
def test_arguments_and_results_of_a_methods_functions_are_checked(tmp_path: Path, name: str, message: str):
    with pytest.raises(RaypflError, match=message) as caught:
        raypfl.run(experiment(tmp_path, method=f"{__name__}:{name}"))
    assert "raypfl/engine" not in str(caught.value)


class HasHelpers(mistaken_methods.Base):
    """Functions with names like those that the engine calls, which it calls itself or has beside the right ones."""

    def round(self, server, cohort):
        self.rounds(server, cohort)

    def rounds(self, server, cohort):
        super().round(server, cohort)

    def round_(self, server, cohort):
        pass


def test_helpers_of_a_method_may_have_names_like_those_that_the_engine_calls():
    refuse_mistaken_hooks(HasHelpers())


def test_a_method_with_an_init_is_told_to_write_its_options_into_the_class():
    with pytest.raises(ConfigError, match=r"Momentum has an __init__; .* as in: beta: float = 0\.1"):

        class Momentum(FedAvg):
            def __init__(self, beta=0.9):
                self.beta = beta


def test_a_component_may_be_written_as_the_frozen_dataclass_that_it_is_in_any_case():
    @dataclass(frozen=True)
    class InTurn(Partition):
        first: int = 0

        def owners(self, samples: Traits, seed: int) -> np.ndarray:
            return (self.first + np.arange(len(samples))) % self.clients

    assert replace(InTurn(clients=3), first=1) == InTurn(clients=3, first=1)
    components: list[Any] = [InTurn(), IID()]
    for component in components:
        with pytest.raises(FrozenInstanceError, match="'clients'"):
            component.clients = 4
        with pytest.raises(FrozenInstanceError, match="'clients'"):
            del component.clients


@pytest.mark.parametrize(
    ("default", "factory"), [([], "list"), ([0.1], r"lambda: \[0\.1\]"), ({"a": 1}, r"lambda: \{'a': 1\}")]
)
def test_an_option_with_a_list_or_a_dict_for_its_default_is_told_what_to_write_instead(default, factory):
    sentence = rf"Rates\.lrs has the default .*; write lrs: \w+ = dataclasses\.field\(default_factory={factory}\)\."
    with pytest.raises(ConfigError, match=sentence):
        type("Rates", (FedAvg,), {"__annotations__": {"lrs": "list"}, "lrs": default, "__module__": __name__})
