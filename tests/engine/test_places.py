"""The devices of a run's server and clients: what they reserve, and which data lie on them."""

from __future__ import annotations

import math
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import raypfl
from raypfl import Mean
from raypfl.common.errors import ConfigError
from raypfl.engine.backends import client_actor
from raypfl.engine.backends.cluster import (
    client_actors,
    client_resources,
    in_one_process,
    refuse_too_many_actors,
    server_resources,
)
from raypfl.engine.building.devices import device_for
from raypfl.engine.building.samples import samples_for
from raypfl.experiment.settings import RaySettings
from raypfl.learning.batches import device_data_budget
from tests.support.federation import Federation
from tests.support.pretend_gpu import GPU, pretend_gpu
from tests.support.runs import ON_RAY, experiment

GIB = 2**30


# --- what Ray is asked for --------------------------------------------------------------------------------------------


class Reserved(raypfl.methods.FedAvg):
    """Records the CPUs that Ray reserved for a client actor and for the server's."""

    def round(self, server, cohort):
        server["cpus"] = [float(cohort.run(self.count)["cpus"]), self.assigned()]

    def count(self, clients):
        return {"cpus": Mean(torch.full((len(clients),), self.assigned()))}

    def assigned(self):
        import ray

        return ray.get_runtime_context().get_assigned_resources().get("CPU", 0.0)


@pytest.mark.thorough
@pytest.mark.usefixtures("ray_cluster")
def test_server_and_client_actors_reserve_what_the_settings_say(tmp_path):
    reserving = ON_RAY | {"ray__actors": 1, "ray__cpus_for_server": 0.25}
    described = experiment(tmp_path, rounds=1, method=f"{__name__}:Reserved", **reserving)
    assert raypfl.run(described).server_state()["cpus"] == [0.5, 0.25]


def cluster(**resources: float) -> Any:
    """A pretended Ray on a cluster of one node with these resources."""
    return SimpleNamespace(nodes=lambda: [{"Alive": True, "Resources": resources}])


def test_client_actors_get_what_the_server_leaves():
    ray = cluster(CPU=8.0, GPU=2.0)
    assert client_actors(ray, RaySettings(gpus_per_actor=0.25), 99) == [8]
    assert client_actors(ray, RaySettings(gpus_per_actor=0.25, gpus_for_server=1), 99) == [4]
    assert client_actors(ray, RaySettings(cpus_for_server=3), 99) == [5]


@pytest.mark.parametrize("settings", [{"gpus_for_server": 1}, {"cpus_for_server": 2, "gpus_per_actor": 0}])
def test_a_server_that_leaves_no_room_for_clients_is_refused(settings):
    message = (
        r"1 client actors .* beside a server with .* more than this cluster has: 2 CPUs and 0 GPUs.*gpus_for_server"
    )
    with pytest.raises(ConfigError, match=message):
        client_actors(cluster(CPU=2.0), RaySettings(**settings), 4)


def test_more_actors_than_the_machine_has_cores_are_refused_before_ray_starts(tmp_path, monkeypatch):
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", pytest.fail)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    reserving = {"engine__backend": "ray", "ray__actors": 5, "ray__cpus_per_actor": 0.5}
    refuse_too_many_actors(RaySettings(actors=5, cpus_per_actor=0.5, cpus_for_server=0.5))
    with pytest.raises(ConfigError, match=r"reserve 3\.5 CPUs, but this machine has 3\. Lower ray\.actors"):
        raypfl.run(experiment(tmp_path, **reserving, ray__cpus_for_server=1))


def test_one_process_for_server_and_clients_reserves_the_larger_of_each():
    settings = in_one_process(RaySettings(cpus_per_actor=2, gpus_per_actor=0.25, cpus_for_server=1, gpus_for_server=1))
    assert client_resources(settings) == {"num_cpus": 2, "num_gpus": 1}
    assert server_resources(settings) == {"num_cpus": 0, "num_gpus": 0}


# --- devices and threads ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("reserved", "device"), [([], "cpu"), ([0], "cuda"), ([1, 2], "cuda")])
def test_a_process_computes_on_a_gpu_if_ray_reserved_one_for_it(monkeypatch, reserved, device):
    monkeypatch.setattr(client_actor.ray, "get_gpu_ids", lambda: reserved)
    assert client_actor.reserved_device() == torch.device(device)


@pytest.mark.parametrize(
    ("gpus", "available", "device"), [(0.5, True, "cuda"), (0.5, False, "cpu"), (0.0, True, "cpu")]
)
def test_in_one_process_the_device_is_a_requested_gpu_if_there_is_one(monkeypatch, gpus, available, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    assert device_for(gpus) == torch.device(device)


class Placed(raypfl.Method):
    """Records the server's device; its clients refuse any but the CPU."""

    def start(self, task):
        return {"device": task.model.device.type}

    def round(self, server, cohort):
        cohort.run(self.look)

    def look(self, clients):
        assert clients.initial.device.type == "cpu"

    def global_model(self, server):
        return None


def test_in_one_process_server_and_clients_each_have_a_network_on_their_own_device(tmp_path):
    with pretend_gpu() as faults:
        result = raypfl.run(experiment(tmp_path, rounds=1, ray__gpus_for_server=1).replace(method=Placed()))
    assert result.server_state() == {"device": "cuda"} and not faults


class CountsThreads(raypfl.methods.FedAvg):
    """Records the number of torch threads of a client and of the server."""

    def round(self, server, cohort):
        reply = cohort.run(self.count, theta=server["theta"])
        server["threads"] = [int(reply["threads"]), torch.get_num_threads()]

    def count(self, clients, theta):
        return {"threads": Mean(torch.full((len(clients),), float(torch.get_num_threads())))}


def test_the_server_computes_with_its_number_of_threads(tmp_path):
    result = raypfl.run(experiment(tmp_path, rounds=1, engine__threads_for_server=2).replace(method=CountsThreads()))
    assert result.server_state()["threads"] == [1, 2]


def test_replies_arrive_on_the_servers_device():
    fed = Federation(method=raypfl.methods.FedAvg())
    cohort = fed.cohort()
    cohort.task = SimpleNamespace(model=SimpleNamespace(device=GPU), num_clients=fed.task.num_clients)
    with pretend_gpu() as faults:
        theta = cohort.run(fed.method.train, theta=fed.context.initial)["theta"]
        assert theta.device == GPU and theta.shape == (fed.model.size,) and not faults


# --- data -------------------------------------------------------------------------------------------------------------


def test_actors_on_one_card_divide_the_share_of_it_that_data_may_take(monkeypatch):
    card = SimpleNamespace(total_memory=80 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    rooms = [device_data_budget(torch.device("cuda"), 0.25, gpus) for gpus in (1, 0.1, 4)]
    assert rooms == [20 * GIB, 2 * GIB, 20 * GIB]  # of four cards it computes on one
    assert device_data_budget(torch.device("cpu"), 0.25, 0) == math.inf


@pytest.mark.parametrize("room", [0.0, 10.0**9])
def test_data_larger_than_their_room_stay_on_the_host_and_batches_arrive_on_the_device(tmp_path, room):
    settings = experiment(tmp_path)
    data = settings.load_data()
    model = SimpleNamespace(device=GPU, dtype=torch.float32)
    with pretend_gpu() as faults:
        samples = samples_for(data, model, (), room)
        x, y = samples.take(np.array([3, 1, 4]))
        assert x.device == y.device == samples.labels_of(np.array([3])).device == samples.normalise(x).device == GPU
        assert x.shape == (3, 1, 8, 8) and x.dtype == torch.uint8 and not faults

    size = data.inputs.nbytes + data.labels.nbytes
    assert samples.resident == (size if room else 0)
