"""An experiment's description: what it takes, what it refuses, and in which words."""

from __future__ import annotations

import pickle
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from ray import cloudpickle
from torch import Tensor

from raypfl import Clients, Mean
from raypfl.common import registry
from raypfl.common.errors import ConfigError
from raypfl.data import Dirichlet
from raypfl.devices.hardware import LogNormalHardware
from raypfl.experiment import Experiment, experiments
from raypfl.experiment.recipes import RECIPES
from raypfl.learning.optimizers import SGD, Adam, AdamW, LocalOptimizer
from raypfl.learning.settings import TrainingSettings
from raypfl.methods import Ditto, FedAvg


def refusal(**values) -> str:
    with pytest.raises(ConfigError) as error:
        Experiment(**values)
    return str(error.value)


def method_names(planned: list[Experiment]) -> list[str]:
    return [experiment.to_dict()["method"]["name"] for experiment in planned]


def test_a_component_is_a_name_a_description_or_an_object():
    expected = Experiment(method=Ditto(lam=2.0))
    assert Experiment(method={"name": "ditto", "lam": 2}) == expected
    assert Experiment(method="ditto").override(["method.lam=2"]) == expected


def test_a_path_is_the_text_of_it():
    data = {"name": "parquet", "root": Path("digits"), "pools": {"other": {"name": "parquet", "root": Path("more")}}}
    described = Experiment(output=Path("my") / "runs", data=data).to_dict()
    assert (described["output"], described["data"]["root"]) == ("my/runs", "digits")
    assert described["data"]["pools"]["other"]["root"] == "more"


def test_a_local_optimizer_is_a_name_a_description_or_an_object():
    expected = Experiment(training=TrainingSettings(lr=0.01, optimizer=Adam(beta1=0.5)))
    assert Experiment(training={"lr": 0.01, "optimizer": {"name": "adam", "beta1": 0.5}}) == expected

    changes = ["training.optimizer.beta1=0.5", "training.optimizer=adam", "training.lr=0.01"]
    assert Experiment().override(changes) == expected
    assert expected.override(["training.optimizer=sgd", "training.lr=0.1"]) == Experiment()
    assert Experiment(training={"optimizer": "sgd", "momentum": 0.9}).training.local_optimizer == SGD(momentum=0.9)

    (compared,) = experiments({"training": {"optimizer": "adam", "lr": 0.01}}, ["training.optimizer.beta1=0.5"])
    assert compared == expected


class Phased(FedAvg):
    """Has a local optimizer as an option."""

    head_optimizer: LocalOptimizer = SGD(momentum=0.9)

    def train(self, clients: Clients, theta: Tensor) -> dict[str, Mean]:
        return {"theta": Mean(clients.sgd(clients.loss, theta, optimizer=self.head_optimizer))}


def test_a_method_may_have_a_local_optimizer_as_an_option():
    expected = Experiment(method=Phased(head_optimizer=AdamW(eps=1e-3)))
    described = {"name": f"{__name__}:Phased", "head_optimizer": {"name": "adamw", "eps": 1e-3}}
    assert Experiment(method=described) == Experiment.from_yaml(expected.to_yaml()) == expected
    assert Experiment(method=Phased()).override(["method.head_optimizer=adamw"]).method.head_optimizer == AdamW()

    message = refusal(method={"name": f"{__name__}:Phased", "head_optimizer": {"name": "adam", "beta": 1}})
    assert "method.head_optimizer.beta is not an option of adam; did you mean" in message


@pytest.mark.parametrize(
    ("training", "sentence"),
    [
        (
            {"optimizer": "adam", "momentum": 0.9},
            "training.momentum is 0.9, which has no effect while training.optimizer is 'adam'",
        ),
        ({"optimizer": "addam"}, "There is no optimizer called 'addam'; did you mean 'adam'?"),
        ({"optimizer": {"name": "sgd", "momentum": 0.9}}, "options are training.momentum and training.nesterov"),
        (
            {"optimizer": {"name": "adam", "beta1": 1.0}},
            "The optimizer's beta1 is 1.0; it must be at least 0 and below 1",
        ),
        ({"optimizer": 3}, "training.optimizer is 3; it must be a name"),
        ({"optimizer": "adam", "lrr": 3}, "training.lrr is not a setting of training; did you mean 'training.lr'?"),
    ],
)
def test_an_invalid_local_optimizer_is_refused(training, sentence):
    assert sentence in refusal(training=training)


def test_a_method_of_a_comparison_may_have_its_own_settings():
    settings = {"training": {"lr": 0.05, "optimizer": "adam"}, "model": {"name": "lenet"}, "rounds": 7}
    settings |= {"evaluation.every": 7}
    values = {
        "methods": ["fedavg", {"name": "ditto", "lam": 2, "settings": settings}],
        "training": {"epochs": 3, "lr": 0.2},
        "seeds": 2,
    }

    fedavg, second_seed, ditto, _ = experiments(values, ["training.batch_size=5"])

    assert fedavg.method == second_seed.method == FedAvg()
    assert fedavg.training == TrainingSettings(lr=0.2, epochs=3, batch_size=5)
    assert ditto.method == Ditto(lam=2.0) and (ditto.model.name, ditto.model.options, ditto.rounds) == ("lenet", {}, 7)
    assert (fedavg.evaluation.every, ditto.evaluation.every) == (Experiment().evaluation.every, 7)
    assert ditto.training == TrainingSettings(lr=0.05, epochs=3, batch_size=5, optimizer=Adam())

    (alone,) = experiments({"method": {"name": "ditto", "settings": {"model.hidden": [3], "training.lr": 0.05}}})
    assert alone.model.options == {"hidden": [3]} and alone.training.lr == 0.05


@pytest.mark.parametrize("of_comparison", [{"methods": ["fedavg", "ditto"]}, {"seeds": 3}], ids=str)
def test_what_a_comparison_has_is_no_setting_of_an_experiment(of_comparison):
    assert "give the results to raypfl.compare" in refusal(**of_comparison)


def test_an_assignment_replaces_a_methods_own_setting_and_is_refused_if_another_one_leaves_it_without_effect():
    settings = {"asynchronous.buffer": 2, "rounds": 80}
    source = {
        "devices": {"hardware": "lognormal"},
        "methods": ["fedavg", {"name": "fedavg", "settings": settings}],
    }
    synchronous, asynchronous = experiments(source, ["rounds=3"])
    assert (synchronous.rounds, asynchronous.rounds, asynchronous.asynchronous.buffer) == (3, 3, 2)

    # A command that also gives the methods means both.
    command = [f"methods={[{'name': 'fedavg', 'settings': settings}]}", "rounds=3"]
    (experiment,) = experiments(source, command)
    assert experiment.rounds == 80

    with pytest.raises(ConfigError, match=r"^cohort.deadline=9.0 has no effect on fedavg with settings .*'rounds': 80"):
        experiments(source, ["cohort.deadline=9"])


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"partition.alpha": 1},
            "settings of method 'ditto' has partition.alpha, which all methods of a comparison share",
        ),
        (
            {"training.lrr": 1},
            "In the settings of method 'ditto': training.lrr is not a setting of training; did you",
        ),
        ("fast", "settings of method 'ditto' is 'fast'; it must be dotted keys and values"),
    ],
)
def test_invalid_settings_of_a_method_are_refused(settings, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        experiments({"methods": ["fedavg", {"name": "ditto", "settings": settings}]})


def test_options_without_a_name_are_those_of_the_default():
    without_names = Experiment(partition={"clients": 7}, method={"server_lr": 0.5}, model={"hidden": [5]})
    assert without_names == Experiment(
        partition=Dirichlet(clients=7), method=FedAvg(server_lr=0.5), model={"name": "mlp", "hidden": [5]}
    )


def test_a_partition_is_an_instance_with_its_options():
    described = Experiment(partition={"name": "dirichlet", "clients": 5, "alpha": 1})
    assert described.partition == Dirichlet(clients=5, alpha=1.0)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"method": "ditto", "model": {"name": "mlp", "hidden": (3, 4)}, "seed": 3},
        {"training": {"lr": 1e-7, "schedule": "step", "milestones": [1, 2]}, "cohort": {"size": 3}},
        {
            "devices": {"availability": {"name": "uniform", "low": 0.2, "high": 1.0}},
            "failures": {"loss_limit": float("inf")},
        },
        {"training": {"lr": 1e-3, "optimizer": {"name": "adamw", "beta2": 0.99}}},
        {"training": {"lr": np.float64(0.3)}, "seed": np.int64(2), "name": "Ångström"},
    ],
)
def test_an_experiment_written_as_yaml_and_read_again_is_equal(values):
    experiment = Experiment(**values)
    assert Experiment.from_yaml(experiment.to_yaml()) == experiment


def test_a_file_and_its_text_describe_the_same_experiment(tmp_path: Path):
    path = tmp_path / "mine.yaml"
    path.write_text("rounds: 3\nmethod: ditto\n")
    assert Experiment.from_yaml(path) == Experiment.from_yaml(str(path)) == Experiment(rounds=3, method="ditto")


def test_an_experiment_can_be_pickled():
    experiment = Experiment(method="ditto")
    assert pickle.loads(pickle.dumps(experiment)) == experiment


def test_a_pattern_that_begins_with_a_star_needs_no_quotes():
    experiment = Experiment(method="fedalt").override(["method.personal=*conv1.weight"])
    assert experiment.method.personal == "*conv1.weight"


def test_a_method_of_a_script_has_its_options_after_its_class_came_back_from_another_process(monkeypatch):
    """A class of `__main__` travels by value, and its return to the process that has it sets its fields anew."""

    class OfAScript(FedAvg):
        mu: float = 0.1

    OfAScript.__module__ = "__main__"
    OfAScript.__qualname__ = "OfAScript"
    monkeypatch.setattr(sys.modules["__main__"], "OfAScript", OfAScript, raising=False)
    monkeypatch.setattr(registry, "user_modules", set())
    before = Experiment(method=OfAScript)

    assert cloudpickle.loads(cloudpickle.dumps(OfAScript)) is OfAScript
    assert Experiment(method=OfAScript) == before


def test_a_users_own_method_is_named_by_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "my_own_method.py").write_text(
        "from raypfl.methods import FedAvg\n\nclass Mine(FedAvg):\n    strength: float = 1.0\n\n"
        "    def global_model(self, server):\n        return self.strength * server['theta']\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    experiment = Experiment(method={"name": "my_own_method:Mine", "strength": 2})
    assert experiment.method.strength == 2.0
    assert Experiment.from_yaml(experiment.to_yaml()) == experiment


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"method": {"name": "ditto", "lamda": 1}},
            "lamda is not an option of ditto; did you mean 'method.lam'?",
        ),
        (
            {"training": {"learning_rate": 1}},
            "training.learning_rate is not a setting of training; did you mean 'training.lr'?",
        ),
        (
            {"training": {"lerning_rate": 1}},
            "is not a setting of training; did you mean 'training.lr'?",
        ),
        (
            {"training": {"xyz": 1}},
            "training.xyz is not a setting of training; choose one of: ",
        ),
        ({"trainning": {}}, "trainning is not a setting of an experiment; did you mean 'training'?"),
        ({"lr": 0.1}, "lr is not a setting of an experiment; did you mean 'training.lr'?"),
        ({"training.lr": 0.1}, "write it in its section, as in training={'lr': ...}."),
        ({"lamm": 0.1}, "lamm is not a setting of an experiment; did you mean 'method.lam'?"),
        ({"batch_sizes": 1}, "batch_sizes is not a setting of an experiment; did you mean 'training.batch_size' or"),
        ({"alpha": 0.1}, "not a setting of an experiment; did you mean 'partition.alpha' or 'method.alpha'?"),
        ({"data": {"alpha": 0.1}}, "not an option of digits; did you mean 'partition.alpha' or 'method.alpha'?"),
        ({"engine": {"device": "cuda"}}, "not a setting of engine; did you mean 'ray.gpus_per_actor=1'?"),
        ({"num_clients": 9}, "num_clients is not a setting of an experiment; did you mean 'partition.clients'?"),
        ({"method": {"name": "fedavg", "lam": 1}}, "method.lam is not an option of fedavg; ditto, fedacg, fedamp,"),
        ({"method": {"name": "heterofl", "lam": 1}}, "12 more have it. Those of heterofl: "),
        ({"data": "CIFAR-10"}, "There is no data set called 'CIFAR-10'; did you mean 'cifar10'?"),
        ({"method": "dito"}, "There is no method called 'dito'; did you mean 'ditto'?"),
        ({"method": "my/mine.py"}, "no method called 'my/mine.py'; did you mean 'my.mine:ClassName'?"),
        (
            {"data": "people/people.csv"},
            "; a table is read by data=table data.root=people/people.csv data.target=COLUMN",
        ),
        (
            {"method": {"name": "fedper", "personal": 3}},
            'method.personal is 3; it must be text, in quotes: method.personal=\'"3"\' on the command line, "3" in a',
        ),
        ({"name": True}, "it must be text, in quotes: name='\"true\"' on"),
        ({"data": "digit"}, "There is no data set called 'digit'; did you mean 'digits'?"),
        ({"data": {"rot": "x"}}, "data.rot is not an option of digits; did you mean 'data.root'?"),
        (
            {"model": {"name": "lenet", "hidden": [3]}},
            "model.hidden is not an option of lenet; mlp has it.",
        ),
        ({"model": {"name": "mlp", "hidden": 3}}, "model.hidden is 3; it must be a list, such as [3]."),
        ({"evaluation": {"protocols": "locale"}}, "is 'locale'; it must be a list, such as [local]."),
        ({"method": {"name": "ditto", "lam": "much"}}, "method.lam is 'much'; it must be a number."),
        ({"data": {"pools": {"auxiliary": "much"}}}, "data.pools.auxiliary is 'much', but must be a share of the"),
        (
            {"data": {"pools": {"ood/x": {"name": "csv", "size": "big"}}}},
            "data.pools.ood/x.size is 'big'; it must be a",
        ),
        ({"method": "json:JSONDecoder"}, "method is 'json:JSONDecoder', which is not a subclass of Method."),
        ({"method": 5}, "method is 5; it must be a name"),
        ({"rounds": 2.5}, "rounds is 2.5; it must be a whole number."),
        ({"rounds": 0}, "rounds is 0; it must be at least 1."),
        ({"cohort": "all"}, "cohort is 'all'; it must be options as 'key: value'."),
        ({"cohort": 5}, "cohort is 5, but has several settings; did you mean cohort.size=5?"),
        ({"engine": "inline"}, "engine is inline, but has several settings; did you mean engine.backend=inline?"),
        ({"tracking": False}, "tracking is false, but has several settings; did you mean tracking.mlflow=false?"),
        ({"cohort": 0.5}, "cohort is 0.5, but has several settings; did you mean cohort.fraction=0.5?"),
        ({"training": {"lr": float("nan")}}, "training.lr is nan; it must be above 0."),
        (
            {"training": {"precision": "tf32"}},
            "training.precision is 'tf32', which has no effect on CPUs; give client actors GPUs (ray.gpus_per_actor), "
            "or choose fp32.",
        ),
        ({"training": {"milestones": [0], "schedule": "step"}}, "training.milestones is 0; it must be at least 1."),
        ({"training": {"schedule": "linear"}}, "training.schedule is 'linear'; it must be 'constant', "),
        (
            {"training": {"nesterov": True}},
            "training.nesterov is true, which has no effect while training.momentum",
        ),
        (
            {"training": {"schedule": "exponential"}},
            "which needs a training.decay below 1, such as 0.99.",
        ),
        ({"training": {"warmup_rounds": 31}}, "training.warmup_rounds is 31, but rounds is 30."),
        ({"cohort": {"size": 21}}, "cohort.size is 21, but partition.clients is 20"),
        ({"devices": {"availability": {"name": "uniform", "low": 0.5, "high": 0.4}}}, "give low <= high."),
        ({"devices": {"availability": "diurnal"}}, "without devices.hardware there is no simulated time"),
        ({"cohort": {"deadline": 9}}, "has no effect while devices.hardware is null"),
        (
            {"cohort": {"over_selection": 2, "size": 20}, "devices": {"hardware": "lognormal"}},
            "cohort.over_selection is 2.0, which has no effect, since all clients are drawn",
        ),
        ({"cohort": {"over_selection": 0.5}, "devices": {"hardware": "lognormal"}}, "it must be at least 1, such"),
        (
            {"evaluation": {"protocols": ["mine"]}},
            "evaluation.protocols has 'mine', which is not a protocol; choose one of: ",
        ),
        ({"method": {"name": Phased}}, "own by its module: 'tests.experiment.test_config:Phased'."),
        ({"model": "math:pi"}, "model is 'math:pi', which is not a class or function with options."),
        ({"seed": 10**20}, "seed is 100000000000000000000; it must be below 2^63."),
        ({"training": {"lr": 1e300}}, "training.lr is 1e+300; it must be a number that 32 bits can hold, from 1e-38"),
        ({"privacy": {"noise": 1e-300}}, "privacy.noise is 1e-300; it must be a number that 32 bits can hold"),
        ({"method": {"name": "ditto", "lam": 1e300}}, "method.lam is 1e+300; it must be a number that 32 bits"),
        ({"method": {"name": "fedrep", "personal_epochs": 2**31}}, "personal_epochs is 2147483648; it must be below"),
        ({"rounds": 2**31}, "rounds is 2147483648; it must be below 2^31."),
        ({"engine": {"threads": 100_000}}, "engine.threads is 100000; it must be at least 1 and at most 1024."),
        ({"checkpoint": {"location": "s3://"}}, "checkpoint.location is 's3://'; it must be a folder, or a URI"),
        ({"output": "a\0"}, "it must be a folder"),
        ({"output": "s3://bucket/runs"}, "it must be a folder, not a bucket"),
        ({"name": "x" * 101}, "at most 100 bytes"),
        ({"name": "a/b"}, "name is 'a/b'; it must be letters, digits"),
    ],
)
def test_a_mistake_is_explained_in_a_sentence(values, sentence):
    assert sentence in refusal(**values)


@pytest.mark.parametrize(
    ("assignment", "key"),
    [
        ("rounds=true", "rounds"),
        ("training.lr=true", "training.lr"),
        ("engine.group_size=true", "engine.group_size"),
        ("privacy.noise=true", "privacy.noise"),
        ("ray.gpus_per_actor=true", "ray.gpus_per_actor"),
        ("method.lam=true", "method.lam"),
        ("partition.alpha=false", "partition.alpha"),
        ("training.optimizer.beta1=true", "training.optimizer.beta1"),
        ("model.hidden=[8, true]", "model.hidden[1]"),
        ("ray.pools=[{actors: true}]", "ray.pools[0].actors"),
        ("devices.availability={name: uniform, low: true, high: 1}", "devices.availability.low"),
        ("data.pools={aux: true}", "data.pools.aux"),
        ("seeds=true", "seeds"),
    ],
)
def test_a_boolean_is_no_number(assignment, key):
    described = {"method": "ditto", "training": {"optimizer": "adam"}}
    with pytest.raises(ConfigError, match=rf"^{re.escape(key)} is (True|False)[;,]"):
        experiments(described, [assignment])


def test_all_mistakes_are_reported_at_once():
    text = refusal(rounds=0, training={"momentun": 0.9}, partition={"name": "iid", "clients": 0}, method="dito")
    assert text.startswith("The experiment has 4 mistakes:")
    for part in ("rounds is 0", "training.momentun", "partition.clients is 0", "'dito'"):
        assert part in text


def test_settings_built_in_python_are_checked_as_well():
    assert "training.lr is -1" in refusal(training=TrainingSettings(lr=-1))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("rounds: 1\nrounds: 2\n", "line 2, column 1 is not valid YAML: the key 'rounds' is given twice."),
        ("rounds: [1\n", "is not valid YAML"),
        ("seed: 2001-99-99\n", "is not valid YAML: a value is not of the type it looks like"),
        ("seed: !!int x\n", "is not valid YAML: a value is not of the type it looks like"),
        ("seed: " + "[" * 3000, "is not valid YAML: it is nested too deeply."),
        ("- rounds\n", "is a list; it must be 'key: value' lines"),
        ("nowhere.yaml", "There is no file 'nowhere.yaml'."),
    ],
)
def test_text_that_is_no_experiment_is_refused_with_its_place(text, sentence):
    with pytest.raises(ConfigError) as error:
        Experiment.from_yaml(text)
    assert sentence in str(error.value)


@pytest.mark.parametrize("text", ["", "# rounds: 3\n"])
def test_an_empty_file_is_refused(tmp_path: Path, text):
    (tmp_path / "mine.yaml").write_text(text)
    for read in (Experiment.from_yaml, experiments):
        with pytest.raises(ConfigError, match=r"mine\.yaml is empty; write 'key: value' lines"):
            read(tmp_path / "mine.yaml")


def test_yaml_may_merge_mappings():
    text = "cohort: &few {size: 2}\nray: {<<: {actors: 1}, dashboard: true}\n"
    assert Experiment.from_yaml(text).ray.actors == 1


def test_numbers_in_yaml_may_have_an_exponent_without_a_point():
    assert Experiment.from_yaml("training: {lr: 1e-3}").training.lr == 1e-3


def test_overriding_a_method_starts_from_its_defaults_in_either_order():
    base = Experiment(method={"name": "ditto", "lam": 5, "server_lr": 0.5})
    for words in (["method=ditto", "method.lam=1"], ["method.lam=1", "method=ditto"]):
        assert base.override(words).method == Ditto(lam=1.0)


def test_overriding_leaves_the_original_as_it_was():
    base = Experiment()
    changed = base.override(
        ["training.lr=0.05", "model.hidden=[8]", "devices.hardware.watts=1", "devices.hardware=lognormal"]
    )
    assert (base.training.lr, changed.training.lr) == (0.1, 0.05)
    assert base.devices.hardware is None and changed.devices.hardware == LogNormalHardware(watts=1.0)


def test_a_setting_by_keyword_is_the_same_as_an_assignment_of_it():
    by_keyword = Experiment().override(["cohort.size=4"], rounds=5, method=Ditto(lam=1.0), training={"lr": 0.05})
    assert by_keyword == Experiment().override(
        ["cohort.size=4", "rounds=5", "method={name: ditto, lam: 1}", "training.lr=0.05"]
    )
    with pytest.raises(ConfigError, match=r"^lr is not a setting of an experiment; did you mean 'training\.lr'"):
        Experiment().override(lr=0.1)
    with pytest.raises(ConfigError, match="rounds is <built-in function print>; a setting is a number, text, a list"):
        Experiment().override(rounds=print)


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("rounds", "'rounds' is not an assignment"),
        (
            "method={name:",
            "has no '}' for its '{'. A shell divides what has spaces: put the whole assignment in quotes",
        ),
        ("rounds.x=1", "rounds.x cannot be set: rounds is 30, which has no parts."),
        ("rounds=[1", "The value in 'rounds=[1'"),
        ("lr=1", "did you mean 'training.lr'?"),
    ],
)
def test_an_override_that_makes_no_sense_is_refused(word, sentence):
    with pytest.raises(ConfigError) as error:
        Experiment().override([word])
    assert sentence in str(error.value)


def test_replacing_a_field_keeps_the_others():
    experiment = Experiment(rounds=7).replace(seed=3, method=FedAvg())
    assert (experiment.rounds, experiment.seed) == (7, 3)


def test_a_comparison_runs_each_method_with_each_seed():
    planned = experiments("methods: [fedavg, ditto]\nseeds: 2\nseed: 5\n")
    assert method_names(planned) == ["fedavg", "fedavg", "ditto", "ditto"]
    assert [experiment.seed for experiment in planned] == [5, 6, 5, 6]


def test_a_method_option_reaches_the_compared_methods_that_have_it():
    planned = experiments("methods: [fedavg, ditto]\n", ["method.lam=3", "method.server_lr=0.5"])
    assert [experiment.method for experiment in planned] == [FedAvg(server_lr=0.5), Ditto(lam=3.0, server_lr=0.5)]


def test_a_method_option_that_no_compared_method_has_is_refused():
    with pytest.raises(ConfigError, match=r"lamda is not an option of fedavg or ditto; did you mean 'method\.lam'"):
        experiments("methods: [fedavg, ditto]\n", ["method.lamda=3"])


def test_naming_one_method_replaces_a_comparison_by_it():
    assert method_names(experiments("methods: [fedavg, ditto]\n", ["method=local"])) == ["local"]


def test_a_command_that_names_a_method_chooses_it_with_the_options_and_settings_that_the_recipe_gives_it():
    recipe = """
    methods:
      - fedavg
      - {name: ditto, lam: 2.0, settings: {training.lr: 0.5, training.epochs: 3}}
      - {name: ditto, lam: 4.0}
      - {name: fedavg, server_lr: 0.5}
    """

    first, second, third = experiments(recipe, ["methods=[ditto, local]", "training.epochs=2"])

    assert first.method == Ditto(lam=2.0)
    assert (first.training.lr, first.training.epochs) == (0.5, 2)
    assert second.method == Ditto(lam=4.0)
    assert method_names([third]) == ["local"]

    # Variants that a command makes equal are one.
    assert [experiment.method for experiment in experiments(recipe, ["method=ditto", "method.lam=1"])] == [
        Ditto(lam=1.0),
        Ditto(lam=1.0),
    ]
    rates = ["method=ditto", "method.lam=1", "training.lr=0.1", "training.epochs=1"]
    assert [experiment.method for experiment in experiments(recipe, rates)] == [Ditto(lam=1.0)]

    # A name alone that the recipe has, too, is not its variants; a description with a name is meant as it stands.
    assert [experiment.method for experiment in experiments(recipe, ["method=fedavg"])] == [FedAvg()]
    assert experiments(recipe, ["methods=[{name: ditto}]"])[0].method == Ditto()
    assert experiments("method: {server_lr: 0.5}\n", ["method=fedavg"])[0].method == FedAvg(server_lr=0.5)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("methods: ditto\n", "methods is 'ditto'; it must be a list, such as"),
        ("methods: []\n", "methods is []; it must be a list, such as"),
        ("method: [fedavg, ditto]\n", "method is ['fedavg', 'ditto']; give several as methods"),
        ("seeds: 0\n", "seeds is 0; it must be a whole number from 1 to 10000"),
        ("method: ditto\nmethods: [fedavg]\n", "Both method and methods are given"),
    ],
)
def test_a_comparison_that_makes_no_sense_is_refused(text, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        experiments(text)


def test_every_recipe_describes_experiments():
    assert "digits" in RECIPES
    for name in RECIPES:
        assert experiments(RECIPES.text(name))
        assert RECIPES.summary(name)


def test_the_error_for_an_unknown_recipe_names_the_nearest():
    with pytest.raises(ConfigError, match="no recipe called 'digts'; did you mean 'digits'"):
        RECIPES.text("digts")


def test_a_list_that_contains_itself_is_refused():
    with pytest.raises(ConfigError, match=r"not valid YAML: .*contains itself"):
        experiments({}, ["ray.mixed_devices=&a [*a]"])


def test_the_name_of_a_file_of_ones_own_is_taken_for_its_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_head.py").touch()
    with pytest.raises(ConfigError, match="no method called 'own_head'; did you mean 'own_head:ClassName'"):
        Experiment(method="own_head")
