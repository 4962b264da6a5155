"""The Ray backend: the same bits whatever the number of actors, and whatever happens to them."""

from __future__ import annotations

import functools
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import raypfl
from raypfl.common.errors import ConfigError, RaypflError
from raypfl.engine.backends.session import spare_server
from raypfl.engine.events import RoundFinished, RunFinished, RunStarted, Warned
from raypfl.storage.checkpoints import last_round
from tests.analysis.test_analyses import observed
from tests.support.processes import call, start_command
from tests.support.runs import EVENTFUL, ON_RAY, Interrupt, experiment, same_tables

pytestmark = pytest.mark.usefixtures("ray_cluster")


def on_ray(tmp_path: Path, actors: int | str = 2, **changes) -> raypfl.Experiment:
    return experiment(tmp_path, **(ON_RAY | {"ray__actors": actors} | changes))


@pytest.fixture(scope="module")
def inline(tmp_path_factory):
    """A function that carries out an inline run, once for all tests that compare theirs with it."""

    @functools.cache
    def run(**changes) -> raypfl.Result:
        return raypfl.run(experiment(tmp_path_factory.mktemp("inline"), **changes))

    return run


@pytest.fixture(scope="module")
def undisturbed(inline):
    return inline()


@pytest.fixture(scope="module", params=[2, 3, 1])
def actors(request):
    """How many there are; all tests of one number run after each other, on the same actors."""
    return request.param


@pytest.mark.parametrize("method", ["fedavg", "fedalt"])
def test_a_method_on_ray_has_the_bits_of_an_inline_run(tmp_path, method):
    inline = raypfl.run(experiment(tmp_path, method=method, rounds=3))
    ray = raypfl.run(on_ray(tmp_path, method=method, rounds=3))
    assert ray.weights_hash == inline.weights_hash and same_tables(ray, inline)


def test_a_sequential_executor_on_ray_gives_the_bits_of_an_inline_one(tmp_path):
    inline = raypfl.run(experiment(tmp_path, engine__executor="sequential", rounds=2))
    ray = raypfl.run(on_ray(tmp_path, engine__executor="sequential", rounds=2))
    assert ray.weights_hash == inline.weights_hash


def test_the_last_event_is_the_end_of_the_run(tmp_path):
    events = []
    raypfl.run(on_ray(tmp_path, rounds=1), listeners=[events.append])
    assert isinstance(events[-1], RunFinished) and events[-1].status == "finished"


def test_any_number_of_actors_gives_the_bits_of_an_inline_run(tmp_path, undisturbed, actors):
    result = raypfl.run(on_ray(tmp_path, actors))
    assert result.weights_hash == undisturbed.weights_hash and same_tables(result, undisturbed)


def test_deadlines_and_partial_work_have_the_same_bits_on_any_number_of_actors(tmp_path, inline, actors):
    expected = inline(rounds=3, **EVENTFUL)
    killing = {"method": "tests.support.federated_methods:KillsItsActor", "method__marks": tmp_path}
    # A new process takes seconds to start: one of two actors is killed, and no other.
    result = raypfl.run(on_ray(tmp_path, actors, rounds=3, **EVENTFUL, **(killing if actors == 2 else {})))
    assert (tmp_path / "actor").exists() == (actors == 2)
    assert result.weights_hash == expected.weights_hash and same_tables(result, expected)


NOISE = {"noise": 1.0}
NOISE_AND_MASKS = {"noise": 1.0, "unit": "client", "secure_aggregation": True}


def private(**changes) -> dict[str, object]:
    """Changes of `experiment` for a private run of a few steps, which have a gradient for each sample.

    Clients have the same number of samples, since each number costs the accountant a quarter of a second.
    """
    short = {"rounds": 2, "partition": "{name: iid, clients: 12}", "training__steps": 3, "method__weighting": "uniform"}
    return short | {f"privacy__{name}": value for name, value in changes.items()}


@pytest.mark.parametrize("changes", [pytest.param(NOISE, marks=pytest.mark.thorough), NOISE_AND_MASKS])
def test_noise_and_masks_have_the_same_bits_on_any_number_of_actors(tmp_path, inline, actors, changes):
    expected = inline(**private(**changes))
    result = raypfl.run(on_ray(tmp_path, actors, **private(**changes)))
    assert result.weights_hash == expected.weights_hash and result.privacy.equals(expected.privacy)


def test_analyses_keep_the_same_files_on_any_number_of_actors(tmp_path, actors):
    def files(**changes) -> tuple[str, dict[Path, bytes]]:
        result = raypfl.run(observed(tmp_path, rounds=2, **changes))
        observations = {}
        for file in result.run_dir.rglob("client-*"):
            observations[file.relative_to(result.run_dir)] = file.read_bytes()
        return result.weights_hash, observations

    inline = files()
    assert len(inline[1]) == 6
    assert inline == files(**(ON_RAY | {"ray__actors": actors}))


@pytest.mark.thorough
def test_a_session_keeps_its_client_actors_for_a_run_with_more_or_fewer_that_work_at_once(tmp_path):
    def processes(actors: int | str, clients: int) -> set[str]:
        """Return the processes in which so many clients, each a group, meet in every round."""
        folder = tmp_path / str(clients)
        folder.mkdir()
        meeting = {"method": "tests.support.federated_rendezvous:Rendezvous", "method__marks": folder}
        sizes = {"method__groups": clients, "cohort__size": clients, "engine__group_size": 1, "rounds": 3}
        result = raypfl.run(on_ray(tmp_path, actors, **meeting, **sizes))

        assert result.server_state() == {"met": 3 * clients}
        assert result.metadata["actors"] == clients and result.metadata["group_size"] == 1
        return {mark.name.partition("-")[2] for mark in folder.glob("*/*")}

    pair = processes(2, 2)
    one_for_each_client = processes("null", 4)
    alone = processes(1, 1)
    assert (len(pair), len(one_for_each_client), len(alone)) == (2, 4, 1)
    assert alone < pair < one_for_each_client


@pytest.mark.thorough
def test_large_states_and_small_ones_give_the_bits_of_an_inline_run(tmp_path):
    from raypfl.engine.backends.objects.bundle_replies import SEPARATE_BYTES

    inline = raypfl.run(experiment(tmp_path, rounds=8, evaluation__every=0))
    assert raypfl.run(on_ray(tmp_path, rounds=8, evaluation__every=0)).weights_hash == inline.weights_hash
    large = {"model": "{name: mlp, hidden: [4000]}", "rounds": 3, "evaluation__every": 0}
    assert SEPARATE_BYTES < 4 * 4000 * (64 + 10)
    assert raypfl.run(on_ray(tmp_path, **large)).weights_hash == raypfl.run(experiment(tmp_path, **large)).weights_hash


@pytest.mark.slow
def test_more_states_than_the_object_store_holds_spill_and_give_the_bits_of_an_inline_run(tmp_path):
    settings = {
        "model": "{name: mlp, hidden: [16000]}",  # 4.8 MB a client
        "partition": "{name: iid, clients: 40}",
        "cohort__size": 20,
        "rounds": 6,
        "evaluation__every": 0,
        "engine__group_size": 1,
    }
    inline = raypfl.run(experiment(tmp_path, **settings))
    (tmp_path / "experiment.yaml").write_text(on_ray(tmp_path, **settings).to_yaml())
    script = (
        "import sys, tempfile, ray, raypfl\n"
        "folder = tempfile.mkdtemp(prefix='raypfl-', dir='/tmp')\n"
        "ray.init(num_cpus=2, object_store_memory=80 * 2**20, include_dashboard=False, _temp_dir=folder,\n"
        "         log_to_driver=False)\n"
        "result = raypfl.run(raypfl.Experiment.from_yaml(sys.argv[1]))\n"
        "from ray._private.internal_api import memory_summary\n"
        "here = ray.get_runtime_context().gcs_address  # the machine may have other clusters\n"
        "print('SPILLED', 'Spilled' in memory_summary(here, stats_only=True))\n"
        "print('HASH', result.weights_hash)\n"
        "ray.shutdown()\n"
        "import shutil; shutil.rmtree(folder, ignore_errors=True)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "experiment.yaml")]
    process = subprocess.run(command, env=os.environ, capture_output=True, text=True)

    assert f"HASH {inline.weights_hash}" in process.stdout and "SPILLED True" in process.stdout, process.stderr


def test_actors_that_exceed_the_cluster_are_refused_in_a_sentence(tmp_path):
    with pytest.raises(ConfigError, match=r"GPUs each need more than this cluster has.*Lower ray.actors"):
        raypfl.run(on_ray(tmp_path, ray__gpus_per_actor=0.25))
    with pytest.raises(ConfigError, match="900 client actors"):
        raypfl.run(on_ray(tmp_path, actors=900))


@pytest.mark.thorough
def test_a_run_after_one_that_failed_before_its_first_round_has_the_same_processes(tmp_path, undisturbed):
    raypfl.run(on_ray(tmp_path, rounds=1))
    server = spare_server.server
    with pytest.raises(RaypflError, match="failed before round 1: KeyError: 'gone'"):
        raypfl.run(on_ray(tmp_path, method="tests.common.test_mistakes:FailsAtStart"))
    result = raypfl.run(on_ray(tmp_path))
    assert spare_server.server is server
    assert result.weights_hash == undisturbed.weights_hash and same_tables(result, undisturbed)


# Deaths and errors come last: most of them cost the next run new actors, each with seconds of imports.


def test_an_actor_killed_in_the_middle_of_a_round_changes_no_bit(tmp_path, undisturbed):
    events = []
    killing = on_ray(tmp_path, method="tests.support.federated_methods:KillsItsActor", method__marks=tmp_path)
    result = raypfl.run(killing, listeners=[events.append])
    assert (tmp_path / "actor").exists()
    assert any("actor died" in e.text for e in events if isinstance(e, Warned))
    assert result.weights_hash == undisturbed.weights_hash and same_tables(result, undisturbed)


@pytest.mark.thorough
def test_a_killed_server_is_started_again_and_goes_on_to_the_same_bits(tmp_path, undisturbed):
    events = []
    killing = on_ray(tmp_path, method="tests.support.federated_methods:KillsItsServer", method__marks=tmp_path)
    result = raypfl.run(killing, listeners=[events.append])
    assert any("continues from round 4" in e.text for e in events if isinstance(e, Warned))
    assert sum(isinstance(e, RunStarted) for e in events) == 1
    assert result.weights_hash == undisturbed.weights_hash and same_tables(result, undisturbed)


def test_a_failing_client_is_named_once_with_its_first_traceback(tmp_path):
    with pytest.raises(RaypflError) as caught:
        raypfl.run(on_ray(tmp_path, method="tests.support.federated_methods:FailsOnClient3", cohort__size=12))
    text = str(caught.value)
    assert text.startswith("Client 3 failed in round 1:")
    assert text.count("LookupError: the client's disk is on fire") == 1 and len(text.splitlines()) < 30


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_resumes_to_the_same_bits(tmp_path, undisturbed, number):
    # A location that all nodes reach: client actors write and read the states.
    location = f"file://{tmp_path}/shared"
    longer = on_ray(tmp_path, rounds=500, checkpoint__every=0, evaluation__every=3, checkpoint__location=location)
    stopped = raypfl.run(longer, listeners=[Interrupt(2, number)])
    assert stopped.status == "stopped" and 2 <= stopped.round < 500
    shorter = raypfl.resume(stopped.run_dir, overrides=[f"rounds={stopped.round + 2}"])
    whole = raypfl.run(experiment(tmp_path, rounds=shorter.round, checkpoint__every=0))
    assert shorter.weights_hash == whole.weights_hash and same_tables(shorter, whole)


@pytest.mark.thorough
def test_a_client_that_kills_every_actor_is_named_once_nothing_else_is_left_to_do(tmp_path):
    killing = on_ray(
        tmp_path,
        method="tests.support.federated_methods:KillsEveryActor",
        method__marks=tmp_path,
        failures__deaths=2,
        cohort__size=12,
        checkpoint__location=f"file://{tmp_path}/shared",  # as in the tests before, whose actors it takes
    )

    with pytest.raises(RaypflError, match=r"(?s)Client 3 failed 2 times in a row.*process died"):
        raypfl.run(killing)

    deaths = (tmp_path / "tries").read_text().split()
    alone = deaths.index("1")
    assert 2 <= alone <= 4 and set(deaths[:alone]) == {"2"}  # the group of two clients; others finished meanwhile
    assert 2 <= len(deaths[alone:]) <= 3 and set(deaths[alone:]) == {"1"}  # client 3; the other one finished


def signal_a_run(described: raypfl.Experiment, number: int) -> tuple[str, bool, bool]:
    """Signal this process in a run; returns the run's end, and whether it has two rounds and its Ray left a folder."""
    os.setsid()
    folders = []

    def send_signal(event: object) -> None:
        if isinstance(event, RoundFinished) and event.round == 2:
            import ray

            folders.append(ray._private.worker._global_node.get_temp_dir_path())
            if number == signal.SIGHUP:  # as a terminal sends it: to Ray's processes too
                os.killpg(os.getpid(), number)
            else:
                os.kill(os.getpid(), number)

    result = raypfl.run(described, listeners=[send_signal])
    return result.status, result.round >= 2, os.path.exists(folders[0])


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGTERM, marks=pytest.mark.thorough), pytest.param(signal.SIGHUP, marks=pytest.mark.slow)],
)
def test_a_signalled_run_with_a_local_ray_is_saved_and_leaves_nothing_behind(tmp_path, number):
    described = on_ray(tmp_path, 1, rounds=500, checkpoint__every=0)
    assert call(signal_a_run, described, number) == ("stopped", True, False)


@pytest.mark.slow
@pytest.mark.parametrize("killed_process", ["raylet", "gcs_server"])
def test_if_ray_dies_the_error_says_how_to_continue(tmp_path, killed_process):
    (tmp_path / "experiment.yaml").write_text(on_ray(tmp_path, rounds=500).to_yaml())
    script = (
        "import os, sys, raypfl\n"
        "def kill(event):\n"
        "    if getattr(event, 'round', 0) == 2:\n"
        "        import ray\n"
        "        ray._private.worker._global_node.all_processes[sys.argv[2]][0].process.kill()\n"
        "try: raypfl.run(raypfl.Experiment.from_yaml(sys.argv[1]), listeners=[kill])\n"
        "except raypfl.RaypflError as error: print('SENTENCE', error)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "experiment.yaml"), killed_process]
    process = subprocess.run(command, env=os.environ, capture_output=True, text=True, start_new_session=True)

    assert "SENTENCE Ray has died" in process.stdout and "`raypfl resume" in process.stdout, process.stderr

    (folder,) = (tmp_path / "runs").iterdir()
    round = last_round(str(folder / "checkpoints"))
    assert raypfl.resume(folder, overrides=[f"rounds={round + 1}"]).round == round + 1


def hash_of_run(described: raypfl.Experiment) -> str | None:
    return raypfl.run(described).weights_hash


@pytest.mark.thorough
def test_a_run_attaches_to_a_running_cluster_and_leaves_it_running(tmp_path, undisturbed):
    import ray

    address = ray.get_runtime_context().gcs_address
    assert call(hash_of_run, on_ray(tmp_path, 1, ray__address=address)) == undisturbed.weights_hash
    assert ray.cluster_resources()["CPU"] > 0


@pytest.mark.thorough
def test_an_unreachable_cluster_is_reported_in_a_sentence(tmp_path):
    with pytest.raises(ConfigError, match=r"No Ray cluster can be reached at '127\.0\.0\.1:1'"):
        call(hash_of_run, on_ray(tmp_path, ray__address="127.0.0.1:1"))


def test_a_cluster_that_needs_a_token_is_reported_with_where_to_put_it(tmp_path, monkeypatch):
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # Ray looks for a token there
    with socket.create_server(("127.0.0.1", 0)) as cluster:
        words = ["run", f"ray.address=127.0.0.1:{cluster.getsockname()[1]}", "tracking.mlflow=false"]
        words += [f"output={tmp_path / 'runs'}", "method=fedavg"]
        process = start_command(words, tmp_path / "log")
        process.join()

    log = (tmp_path / "log").read_text()
    assert process.exitcode == 2 and "There is no token for the cluster" in log
    assert "or RAY_AUTH_TOKEN" in log and "propagated" not in log
