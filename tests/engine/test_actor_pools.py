"""How many client actors of each pool have room, and how a description of pools is checked."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypfl.common.errors import ConfigError
from raypfl.engine.backends.actors.actor_pools import ActorPools, reserved, room_for, share_of
from raypfl.experiment import Experiment
from raypfl.experiment.settings import ActorPool
from tests.support.runs import experiment

A100 = {"accelerator_type:A100": 1.0}
H100 = {"accelerator_type:H100": 1.0}
NODES = [{"CPU": 4.0}, {"CPU": 8.0, "GPU": 2.0} | A100, {"CPU": 8.0, "GPU": 1.0} | H100]


def counts(*pools: ActorPool, groups: int = 99, server: dict[str, float] | None = None) -> tuple[list[int], list[int]]:
    actor_pools = ActorPools(pools, server or {}, groups, lambda: NODES)
    return actor_pools.target_counts(), actor_pools.placeable_counts()


def pool(**settings) -> ActorPool:
    return ActorPool(**{"cpus_per_actor": 1.0, **settings})


def test_room_is_counted_node_by_node_and_gpu_by_gpu():
    assert counts(pool()) == ([20], [20])
    assert counts(pool(cpus_per_actor=3)) == ([1 + 2 + 2], [5])  # of 20 CPUs, six actors would have 18
    assert counts(pool(gpus_per_actor=0.4)) == ([3 * 2], [6])  # three GPUs hold seven such shares, but not whole
    assert counts(pool(gpus_per_actor=2)) == ([1], [1])
    assert counts(pool(gpus_per_actor=0.25, accelerator="H100")) == ([4], [4])
    assert counts(pool(gpus_per_actor=1), server={"num_cpus": 0.0, "num_gpus": 1.0}) == ([2], [2])
    assert counts(pool(gpus_per_actor=0.25), server={"num_cpus": 0.0, "num_gpus": 0.5}) == ([10], [10])


def test_the_first_pools_take_room_and_groups_first():
    mixed = pool(gpus_per_actor=0.5), pool(cpus_per_actor=2)
    assert counts(*mixed) == ([6, 2 + 2 + 3], [6, 7])
    assert counts(*mixed, groups=8) == ([6, 2], [6, 2])
    assert counts(*reversed(mixed)) == ([10, 0], [10, 0])
    assert counts(pool(actors=3), pool(), groups=5) == ([3, 2], [3, 2])


def test_a_fixed_number_of_actors_is_wanted_on_any_cluster_and_those_without_room_wait_for_nodes():
    assert counts(pool(actors=30)) == ([30], [20])
    assert counts(pool(max_actors=30)) == ([30], [20])
    assert counts(pool(max_actors=30), groups=4) == ([4], [4])
    assert counts(pool(cpus_per_actor=16, max_actors=3)) == ([3], [0])
    assert counts(pool(cpus_per_actor=16)) == ([1], [0])  # its nodes have left: it waits for others


def test_fewer_actors_share_a_gpu_step_by_step_until_one_has_it_alone():
    pools = ActorPools([pool(gpus_per_actor=share_of(16), actors=40)], {}, 99, lambda: NODES)
    steps = []

    while True:
        change = pools.reduce_sharing(0)
        if change is None:
            break
        _, actors = change
        steps.append(actors)
        assert pools.options(0)["num_gpus"] == share_of(actors)
    assert steps == [12, 9, 7, 6, 5, 4, 3, 2, 1]
    assert pools.target_counts() == [3]  # the others would never have room
    assert ActorPools([pool()], {}, 9, lambda: NODES).reduce_sharing(0) is None


shares = st.one_of(st.just(0.0), st.integers(1, 20).map(share_of), st.integers(1, 4).map(float))
sizes = st.fixed_dictionaries({"CPU": st.integers(0, 64).map(float), "GPU": st.integers(0, 8).map(float)})


@given(st.lists(sizes, max_size=4), st.integers(1, 16).map(lambda quarters: quarters / 4), shares)
def test_the_counted_actors_have_room_and_one_more_has_not(nodes, cpus, gpus):
    room = room_for(reserved(ActorPool(cpus_per_actor=cpus, gpus_per_actor=gpus)), nodes, {})

    expected = 0
    for node in nodes:
        by_cpus = node["CPU"] // cpus
        if gpus == 0:
            by_gpus = math.inf
        elif gpus < 1:
            # Several actors share a GPU, each on one only: 1e-9 undoes the rounding of 1 / gpus.
            by_gpus = node["GPU"] * math.floor(1 / gpus + 1e-9)
        else:
            by_gpus = node["GPU"] // gpus
        expected += min(by_cpus, by_gpus)

    assert room == expected


# --- the description --------------------------------------------------------------------------------------------------


def test_pools_are_read_written_and_overridden():
    settings = Experiment.from_yaml("ray: {pools: [{gpus_per_actor: 0.25, accelerator: A100}, {gpus_per_actor: auto, "
                                 "accelerator: A100, actors: 2}]}")  # fmt: skip
    assert settings.ray.actor_pools == (
        ActorPool(gpus_per_actor=0.25, accelerator="A100"),
        ActorPool(gpus_per_actor="auto", accelerator="A100", actors=2),
    )
    assert Experiment.from_yaml(settings.to_yaml()) == settings
    assert settings.ray.on_gpu and settings.ray.gpus == 0.25

    plain = settings.override(["ray.pools=[]", "ray.actors=3"])
    assert plain.ray.actor_pools == (plain.ray,) and not plain.ray.on_gpu


@pytest.mark.parametrize(
    ("pools", "says"),
    [
        ("[{gpus_per_actor: 1}, {cpus_per_actor: 2}]", r"devices of several types.*ray\.mixed_devices=true"),
        ("[{gpus_per_actor: 1, accelerator: A100}, {gpus_per_actor: 1}]", "devices of several types"),
        ("[{cpus_per_actor: 0}]", r"ray\.pools\[0\]\.cpus_per_actor is 0.0; it must be above 0"),
        ("[{}, {actors: 0}]", r"ray\.pools\[1\]\.actors is 0; it must be at least 1"),
        ("[{actors: 1, max_actors: 2}]", r"ray\.pools\[0\]\.actors and ray\.pools\[0\]\.max_actors are both set"),
        ("[{gpus: 1}]", r"ray\.pools\[0\]\.gpus is not a setting"),
        ("{actors: 1}", r"ray\.pools.*must be a list"),
    ],
)
def test_mistakes_in_pools_are_refused_with_the_settings_name(tmp_path: Path, pools: str, says: str):
    with pytest.raises(ConfigError, match=says):
        experiment(tmp_path, engine__backend="ray", ray__pools=pools)


def test_pools_and_the_settings_of_one_kind_of_actor_exclude_each_other(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"ray\.cpus_per_actor and ray\.pools are both set; give each pool its own"):
        experiment(tmp_path, engine__backend="ray", ray__pools="[{}]", ray__cpus_per_actor=2)
    with pytest.raises(ConfigError, match=r"ray\.actors and ray\.max_actors are both set"):
        experiment(tmp_path, engine__backend="ray", ray__actors=2, ray__max_actors=2)

    mixed = experiment(
        tmp_path, engine__backend="ray", ray__pools="[{gpus_per_actor: 1}, {}]", ray__mixed_devices="true"
    )

    assert len(mixed.ray.actor_pools) == 2
