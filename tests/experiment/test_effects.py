"""A setting that would have no effect is refused where it is set, in whatever way and order; a default never is."""

from __future__ import annotations

import math
import typing
from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
from torch import Tensor

from raypfl import Cohort, Experiment
from raypfl.common.errors import ConfigError
from raypfl.experiment import experiments
from raypfl.experiment.assignments import assign, parse_assignments
from raypfl.experiment.checks.unread_options import unread_options
from raypfl.experiment.yaml_text import write as as_yaml
from raypfl.federation.settings import CohortSettings
from raypfl.learning.privacy import PrivacySettings
from raypfl.methods import METHODS, FedAvg

WITHOUT_EFFECT = {
    "privacy.clip": ["privacy.clip=0.5"],
    "privacy.unit": ["privacy.unit=client"],
    "privacy.delta": ["privacy.delta=1e-6"],
    "evaluation.metric": ["evaluation.metric=weighted"],
    "evaluation.mode": ["evaluation.mode=max"],
    "evaluation.patience": ["evaluation.patience=3"],
    "training.epochs": ["training.epochs=5", "training.steps=20"],
    "training.gamma": ["training.gamma=0.5"],
    "training.decay": ["training.decay=0.9", "training.schedule=cosine"],
    "training.milestones": ["training.milestones=[3]"],
    "training.momentum": ["training.momentum=0.9", "training.optimizer=adam"],
    "cohort.fraction": ["cohort.fraction=0.5", "cohort.size=4"],
    "model.pretrain_epochs": ["model.pretrain_epochs=3"],
    "failures.min_success_fraction": ["failures.min_success_fraction=0.9"],
    "ray.actors": ["ray.actors=2", "engine.backend=inline"],
    "ray.cpus_per_actor": ["ray.cpus_per_actor=0.5", "engine.backend=inline"],
    "ray.accelerator": ["ray.accelerator=A100", "engine.backend=inline"],
    "ray.address": ["ray.address='other:6379'", "engine.backend=inline"],
    "ray.cpus_for_server": ["ray.cpus_for_server=1", "engine.backend=inline"],
    "ray.dashboard": ["ray.dashboard=true", "engine.backend=inline"],
    "ray.data_share": ["ray.data_share=0.5"],
    "engine.cuda_graphs": ["engine.cuda_graphs=false", "ray.pools=[{cpus_per_actor: 2}]"],
    "data.root": ["data.root=/nonexistent"],
    "method.server_beta1": ["method.server_beta1=0.5"],
    "method.order": ["method=fedbabu", "method.order='shared first'"],
    "method.unseen_epochs": ["method=fedbabu", "method.unseen_epochs=3"],
    "method.finetune_lr": ["method=fedavg-ft", "method.finetune_lr=0.1", "method.finetune_epochs=0"],
}


def refusal(make: Callable[[], object]) -> str:
    """The error message of a call that must be refused."""
    with pytest.raises(ConfigError) as caught:
        make()
    return str(caught.value)


def nested(assignments: list[str]) -> dict[str, Any]:
    """Dotted assignments as the nested dict of a description."""
    values: dict[str, Any] = {}
    for path, value in parse_assignments(assignments):
        assign(values, path, value)
    return values


@pytest.mark.parametrize("setting", WITHOUT_EFFECT)
def test_a_setting_without_effect_is_refused_in_every_way_and_order(setting: str):
    for order in permutations(WITHOUT_EFFECT[setting]):
        for make in (
            lambda order=order: experiments({}, order),
            lambda order=order: Experiment().override(order),
            lambda order=order: Experiment(**nested(list(order))),
        ):
            message = refusal(make)
            assert f"{setting} is" in message and "has no effect while" in message


def test_a_setting_is_refused_at_its_default_too_unless_the_setting_it_depends_on_is_given():
    assert "set privacy.noise, or leave" in refusal(lambda: Experiment(privacy={"clip": 1.0}))
    assert "set privacy.noise, or leave" in refusal(lambda: Experiment().override(["privacy.clip=1"]))
    Experiment(privacy={"clip": 1.0, "noise": None})  # as a complete description has it
    Experiment(privacy=PrivacySettings(clip=1.0))
    Experiment(cohort=CohortSettings(size=3))  # has cohort.deadline, without devices.hardware
    assert "no effect" in refusal(lambda: Experiment(privacy=PrivacySettings(clip=2.0)))


def test_patience_needs_several_evaluations_and_delta_noise_above_zero():
    validated = Experiment().override(["evaluation.protocols=[local,val]", "data.val_fraction=0.2", "privacy.noise=0"])
    assert validated.override(["evaluation.every=1", "evaluation.patience=3"]).evaluation.patience == 3
    for change, sentence in {
        (
            "evaluation.every=0",
            "evaluation.patience=3",
        ): "no effect while evaluation.every is 0; raise evaluation",
        ("privacy.delta=1e-6",): "privacy.delta is 1e-06, which has no effect while privacy.noise is 0",
    }.items():
        assert sentence in refusal(lambda words=change: validated.override(words))


def test_cuda_graphs_can_be_off_where_clients_may_train_together_on_a_gpu():
    off = ["engine.cuda_graphs=false"]
    for gpus in ("ray.gpus_per_actor=auto", "ray.pools=[{gpus_per_actor: 0.5}]"):
        assert not Experiment().override([*off, gpus]).engine.cuda_graphs
        one_by_one = [gpus, "engine.executor=sequential"]
        assert "engine.executor is 'sequential'" in refusal(lambda words=one_by_one: Experiment().override(off + words))
    assert Experiment().override([*off, gpus]).override(one_by_one).engine.cuda_graphs


def test_a_share_for_data_has_an_effect_where_clients_or_the_server_have_gpus():
    for gpus in ("ray.gpus_per_actor=auto", "ray.pools=[{gpus_per_actor: 0.5}]", "ray.gpus_for_server=1"):
        assert Experiment().override(["ray.data_share=0.5", gpus]).ray.data_share == 0.5


@pytest.mark.parametrize("setting", WITHOUT_EFFECT)
def test_runs_recorded_before_a_setting_without_effect_was_refused_can_be_read(setting: str):
    recorded = Experiment().to_dict()
    for path, value in parse_assignments(WITHOUT_EFFECT[setting]):
        assign(recorded, path, value)
    others = [word for word in WITHOUT_EFFECT[setting] if not word.startswith(f"{setting}=")]
    assert Experiment.from_record(as_yaml(recorded)) == Experiment().override(others)


def test_runs_recorded_before_cuda_graphs_were_on_by_default_can_be_read():
    for gpus in (0, 1):
        recorded = Experiment(ray={"gpus_per_actor": gpus}).to_yaml().replace("cuda_graphs: true", "cuda_graphs: false")
        assert Experiment.from_record(recorded).engine.cuda_graphs == (gpus == 0)


@pytest.mark.parametrize(
    ("first", "change"),
    [
        (["training.epochs=5"], "training.steps=20"),
        (["privacy.noise=1", "privacy.clip=0.5"], "privacy.noise=null"),
        (["cohort.fraction=0.5"], "cohort.size=4"),
        (["training.schedule=step", "training.milestones=[3]"], "training.schedule=cosine"),
        (["ray.actors=2"], "engine.backend=inline"),
        (["ray.gpus_per_actor=1", "engine.cuda_graphs=false"], "ray.gpus_per_actor=0"),
    ],
)
def test_a_setting_that_a_change_leaves_without_effect_is_reset_to_its_default(first: list[str], change: str):
    changed = Experiment().override(first).override([change])
    assert changed == Experiment().override([change]) == Experiment.from_yaml(changed.to_yaml())

    (compared,) = experiments(nested(first), [change])
    assert compared == changed


def test_what_depends_on_a_setting_that_a_change_leaves_without_effect_is_reset_with_it():
    # A buffer ends the effect of cohort.deadline, on which cohort.quorum and cohort.late depend.
    hardware = {"hardware": "lognormal"}
    changed = Experiment(devices=hardware).override(["asynchronous.buffer=5"])
    assert changed == Experiment(devices=hardware, asynchronous={"buffer": 5})


@pytest.mark.parametrize(
    ("first", "change"),
    [
        ({}, "devices={dropout: 0.2}"),  # devices.hardware, on which cohort.deadline depends, is not set
        ({}, "ray={actors: 2}"),
        ({"devices": {"hardware": "lognormal"}, "asynchronous": {"buffer": 2}}, "devices={dropout: 0.2}"),
    ],
)
def test_a_section_that_is_assigned_as_a_whole_leaves_defaults_elsewhere_alone(first: dict[str, Any], change: str):
    assert Experiment(**first).override([change]) == Experiment(**nested([change]))


def test_a_mistake_in_a_file_is_refused_whatever_is_overridden():
    assert "privacy.clip is 0.5" in refusal(lambda: experiments({"privacy": {"clip": 0.5}}, ["rounds=3"]))


def test_a_component_that_replaces_another_keeps_the_options_that_it_has_too_and_no_option_of_the_other():
    recipe = {"partition": {"name": "dirichlet", "alpha": 0.5, "clients": 7}, "data": {"val_fraction": 0.2}}
    (changed,) = experiments(recipe, ["partition.name=iid"])
    assert changed == Experiment(partition={"name": "iid", "clients": 7}, data={"val_fraction": 0.2})
    with pytest.raises(ConfigError, match=r"partition\.alpha is not an option of iid"):
        experiments(recipe, ["partition.name=iid", "partition.alpha=1"])
    with pytest.raises(ConfigError, match=r"partition\.alhpa is not an option of iid"):
        experiments({"partition": {"alhpa": 0.5}}, ["partition.name=iid"])


def test_an_option_goes_to_the_methods_of_a_comparison_in_which_it_has_an_effect():
    methods = ["fedavg", {"name": "fedavg", "server_optimizer": "adam"}]
    plain, adam = experiments({"methods": methods}, ["method.server_beta1=0.5"])
    assert plain.method == FedAvg() and adam.method == FedAvg(server_optimizer="adam", server_beta1=0.5)

    changed = experiments({"method": "fedavg"}, ["method.server_beta1=0.5", "method.server_optimizer=adam"])
    assert changed[0].method == adam.method
    assert "set method.server_optimizer to" in refusal(lambda: experiments({}, ["method.server_beta1=0.5"]))


@pytest.mark.parametrize("name", list(METHODS))
def test_every_number_of_a_method_has_a_range(name: str):
    out_of_range = {float: math.nan, float | None: math.nan, int: -1, int | None: -1}
    for option, hint in typing.get_type_hints(METHODS.get(name)).items():
        if hint in out_of_range:
            value = out_of_range[hint]
            invalid = {"name": name, option: value}
            assert f"method.{option} is {value}" in refusal(lambda method=invalid: Experiment(method=method))


def test_an_option_keeps_its_range_in_a_subclass_with_another_default():
    assert "it must be 0 or more" in refusal(lambda: Experiment(method={"name": "fedbabu", "finetune_epochs": -1}))
    assert "method.server_lr is 0.0; it must be above 0" in refusal(lambda: Experiment(method={"server_lr": 0}))


class Overriding(FedAvg):
    """Overrides `round`, so that no server optimizer is read; reads one option in a helper, and one never."""

    strength: float = 1.0
    unread: float = 1.0

    def round(self, server: dict[str, Any], cohort: Cohort) -> None:
        server["theta"] = scaled(self, cohort.run(self.train, theta=server["theta"])["theta"])


class ByName(Overriding):
    """Reads an option by a name that no check of its code can see, so all of its options may be read."""

    def round(self, server: dict[str, Any], cohort: Cohort) -> None:
        cohort.log(**{name: getattr(self, name) for name in ("unread",)})


def scaled(method: Overriding, theta: Tensor) -> Tensor:
    return method.strength * theta


def test_an_option_that_a_method_never_reads_is_refused_when_it_is_set():
    server = {"server_optimizer", "server_lr", "server_beta1", "server_beta2", "server_tau"}
    assert unread_options(Overriding) == {"unread", *server}

    name = f"{__name__}:Overriding"
    assert Experiment(method={"name": name, "strength": 2, "weighting": "uniform"})
    message = refusal(lambda: Experiment(method={"name": name, "unread": 2}))
    assert "method.unread is 2.0, which nothing that Overriding does in a run reads" in message
    assert "method.server_lr is 0.5" in refusal(lambda: Experiment(method=Overriding(server_lr=0.5)))
    assert not unread_options(ByName)


@pytest.mark.parametrize("name", list(METHODS))
def test_every_option_of_every_method_is_read(name: str):
    assert not unread_options(METHODS.get(name))
