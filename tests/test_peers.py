"""Measuring raypfl beside other systems: what is pure about it."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import raypfl
from benchmarks import networks
from benchmarks.memory import descendants
from benchmarks.peers import data, environments, report
from benchmarks.peers.__main__ import forget_trials, is_possible, machine, missing
from benchmarks.peers.data import Noise, prepare, sizes, store
from benchmarks.peers.jobs import ACTORS, BARE, BF16, CONTENDERS, FLOWER, FLUKE, INLINE, JOBS, PFL, PFL_TWO, Contender
from benchmarks.peers.local import fit
from benchmarks.peers.measure import Patience, measure, parse
from benchmarks.peers.order import Order, Shards, Stamps, network
from benchmarks.peers.systems import bare
from benchmarks.peers.systems.raypfl import experiment, note_choice
from raypfl.data import load_federated
from raypfl.data.partitions import PARTITIONS
from raypfl.datasets import DataConfig, RawData
from raypfl.models import MODELS

TINY = Noise("tiny", 6, (1, 8, 8), 3, 9, tests=2)


def tiny(config: DataConfig) -> RawData:
    return TINY.raw()


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], Path]:
    monkeypatch.setattr(data, "tiny", tiny, raising=False)
    return prepare(TINY, tmp_path)


@pytest.fixture
def order(prepared: tuple[dict[str, Any], Path], tmp_path: Path) -> Order:
    source, files = prepared
    job = dataclasses.replace(JOBS["mlp"], noise=TINY, batch=2)
    return job.order(INLINE, source, files, tmp_path / "report", cohort=3)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", ["cnn", "lenet", "mlp"])
def test_the_networks_of_contenders_are_raypfls_bit_for_bit(name, layout):
    images, labels = torch.randn(4, 3, 32, 32).contiguous(memory_format=layout), torch.randint(0, 10, (4,))
    computed = []
    for build in (partial(networks.network, name), MODELS.get(name)):
        torch.manual_seed(0)
        net = build(input_shape=(3, 32, 32), num_classes=10)
        loss = torch.nn.functional.cross_entropy(net(images), labels)
        computed.append([loss, *torch.autograd.grad(loss, list(net.parameters()))])
    assert all(torch.equal(theirs, ours) for theirs, ours in zip(*computed, strict=True))


def line(end: float, begin: float | None = None) -> str:
    return json.dumps({"begin": begin, "end": end}) + "\n"


def a_run(job: str, contender: str, rounds: list[float], **more: Any) -> dict[str, Any]:
    measured = {"startup": 4.0, "rounds": rounds, "memory": 1, "problem": None}
    origin = {"commit": "abc1234", "date": "2026-11-20T23:50Z", "load": 0.04}
    return {"job": job, "contender": contender, **measured, **origin} | more


def results(*runs: dict[str, Any]) -> dict[str, Any]:
    about = {"cpu": "a CPU", "cores": 2, "memory_gib": 4.0}
    versions = {
        "flower": {"flwr": "1.2.3", "torch": "2.15.0", "ray": "2.55"},
        "raypfl": {"torch": "2.15.0", "ray": "2.60"},
    }
    return {"machine": about, "versions": versions, "left_out": {}, "runs": list(runs)}


def test_rounds_count_from_when_the_run_has_settled() -> None:
    lines = [line(10.0), line(11.0), line(13.0), line(16.0)]
    assert parse(lines, started=4.0, settle=0.5) == (6.0, [2.0, 3.0])
    assert parse(lines, started=4.0, settle=0.0) == (6.0, [1.0, 2.0, 3.0])


def test_a_round_with_a_beginning_of_its_own_is_timed_from_there() -> None:
    assert parse([line(10.0, begin=9.0), line(14.0, begin=13.5)], started=4.0, settle=0.0) == (6.0, [0.5])


def test_a_line_that_is_still_being_written_is_not_there_yet() -> None:
    assert parse([line(10.0), line(12.0), '{"begin": null, "e'], started=4.0, settle=0.0) == (6.0, [2.0])
    assert parse([], started=4.0, settle=0.0) == (None, [])


def test_stamps_are_what_is_parsed(tmp_path: Path) -> None:
    started = time.monotonic()
    for _ in range(3):
        Stamps(str(tmp_path / "report")).add()
    startup, rounds = parse((tmp_path / "report").read_text().splitlines(keepends=True), started, settle=0.0)
    assert startup is not None and startup >= 0 and len(rounds) == 2


def test_client_sizes_are_the_same_every_time_and_within_their_bounds() -> None:
    drawn = sizes(2000, 10, 100)
    assert drawn.min() == 10 and drawn.max() == 100 and len(np.unique(drawn)) > 50
    assert np.array_equal(drawn, sizes(2000, 10, 100))
    assert set(sizes(5, 50, 50)) == {50}


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_system_gets_the_samples_that_raypfl_gets(prepared: tuple[dict[str, Any], Path], split: str) -> None:
    source, files = prepared
    partition = dict(source["partition"])
    dealt = PARTITIONS.get(partition.pop("name"))(**partition)
    theirs = load_federated(DataConfig(**source["data"]), dealt, seed=0)
    shards = Shards(str(files), split)
    assert len(shards) == theirs.num_clients
    assert np.array_equal(shards.sizes, theirs.sizes(split))
    everything = shards.everything()
    for client in range(theirs.num_clients):
        index = theirs.indices(client, split)
        x, y = shards.client(client)
        seen = (theirs.inputs[index] / theirs.scale - theirs.mean[:, None, None]) / theirs.std[:, None, None]
        assert np.allclose(x.numpy(), seen, atol=1e-5)
        assert np.array_equal(y.numpy(), theirs.labels[index])
        assert torch.equal(everything[0][shards.offsets[client] : shards.offsets[client + 1]], x)


def test_samples_read_a_client_at_a_time_are_those_that_are_resident(
    prepared: tuple[dict[str, Any], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    resident = Shards(str(prepared[1]))
    monkeypatch.setattr("benchmarks.peers.order.RESIDENT", 0)
    assert torch.equal(Shards(str(prepared[1])).client(3)[0], resident.client(3)[0])


def test_an_order_survives_its_file(order: Order, tmp_path: Path) -> None:
    order.write(tmp_path / "order.json")
    assert Order.read(str(tmp_path / "order.json")) == order


def test_every_process_begins_with_the_same_weights(order: Order) -> None:
    shards = Shards(order.files)
    one, two = network(order, shards).state_dict(), network(order, shards).state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_local_training_takes_the_steps_that_the_job_says(order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 0
    step = torch.optim.SGD.step

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal steps
        steps += 1
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.SGD, "step", counted)
    net = torch.nn.Linear(4, 10)
    fit(net, torch.randn(5, 4), torch.zeros(5, dtype=torch.long), dataclasses.replace(order, batch=2, epochs=3))
    assert steps == 9


def test_dittos_pull_is_the_gradient_of_the_squared_distance(order: Order) -> None:
    once = dataclasses.replace(order, batch=5, epochs=1, lr=0.1, momentum=0.0, lam=0.5)
    x, y = torch.randn(5, 4), torch.zeros(5, dtype=torch.long)
    pulled = torch.nn.Linear(4, 10)
    plain = torch.nn.Linear(4, 10)
    plain.load_state_dict(pulled.state_dict())
    before = [p.detach().clone() for p in pulled.parameters()]
    anchor = [torch.ones_like(p) for p in before]
    fit(pulled, x, y, once, anchor)
    fit(plain, x, y, once)
    for p, q, start, a in zip(pulled.parameters(), plain.parameters(), before, anchor, strict=True):
        assert torch.allclose(p, q - once.lr * once.lam * (start - a), atol=1e-6)


@pytest.mark.parametrize("method", ["fedavg", "ditto", "evaluation"])
def test_raypfl_reports_its_rounds_and_what_its_trial_chose(order: Order, method: str, tmp_path: Path) -> None:
    wanted = dataclasses.replace(order, method=method, cohort=order.clients)
    raypfl.run(experiment(wanted, str(tmp_path)).replace(rounds=3), listeners=[partial(note_choice, order.report)])
    stamps = [json.loads(text) for text in Path(order.report).read_text().splitlines()]
    assert len(stamps) == (2 if method == "evaluation" else 3)
    assert all((stamp["begin"] is None) == (method != "evaluation") for stamp in stamps)
    notes = Stamps(order.report).notes()
    assert notes["executor"] in ("sequential", "vectorised") and isinstance(notes["channels_last"], bool)


@pytest.mark.parametrize("method", ["fedavg", "ditto", "evaluation"])
def test_the_bare_loop_reports_its_rounds(order: Order, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begins: list[float | None] = []

    def add(self: Stamps, begin: float | None = None) -> None:
        begins.append(begin)
        if len(begins) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Stamps, "add", add)
    with pytest.raises(KeyboardInterrupt):
        bare.run(dataclasses.replace(order, method=method))
    assert all((begin is None) == (method != "evaluation") for begin in begins)


def test_the_floor_of_an_evaluation_runs_each_clients_own_network_on_its_own_normalised_samples(order: Order) -> None:
    shards = Shards(order.files, "test")
    first = network(order, shards).state_dict()
    pairs = bare.prepared(order)
    assert len(pairs) == order.clients
    for client, (model, batch) in enumerate(pairs):
        assert not model.training
        assert torch.equal(batch, shards.client(client)[0])
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, first[name] + 1e-6 * client)


def test_the_floor_of_an_evaluation_prepares_nothing_while_it_is_timed(
    order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    passes: list[int] = []
    client = Shards.client

    def counted(self: Shards, k: int) -> Any:
        reads.append(k)
        return client(self, k)

    def add(self: Stamps, begin: float | None = None) -> None:
        passes.append(len(reads))
        if len(passes) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Shards, "client", counted)
    monkeypatch.setattr(Stamps, "add", add)
    with pytest.raises(KeyboardInterrupt):
        bare.evaluate(order)
    assert passes == [order.clients, order.clients]


@pytest.mark.parametrize("job", JOBS.values(), ids=lambda job: job.name)
def test_raypfls_description_of_a_job_does_the_same_work(job: Any, tmp_path: Path) -> None:
    for contender in job.contenders:
        if contender.system == "raypfl":
            wanted = job.order(contender, job.noise.source, tmp_path, tmp_path / "report", job.cohort)
            described = experiment(wanted, str(tmp_path))
            training = described.training
            assert (training.lr, training.momentum, training.batch_size) == (job.lr, job.momentum, job.batch)
            assert (training.epochs, described.cohort.size) == (job.epochs, job.cohort)
            assert described.partition.clients == job.noise.clients
            assert (described.engine.backend == "ray") == (contender.processes > 1)


def test_every_measured_run_of_raypfl_tries_executors_itself(order: Order, tmp_path: Path) -> None:
    raypfl.run(experiment(order, str(tmp_path / "runs")).replace(rounds=1))
    assert list((store(tmp_path) / "trials").iterdir())
    forget_trials(tmp_path)
    assert not (store(tmp_path) / "trials").exists()
    assert list(store(tmp_path).rglob("samples.arrow"))


def test_the_lenet_job_is_fifty_full_batches() -> None:
    job = JOBS["lenet"]
    assert job.noise.smallest == job.noise.largest
    assert divmod(job.noise.smallest, job.batch) == (50 // job.epochs, 0)


def test_a_job_names_everybody_or_says_why_not() -> None:
    systems = {contender.system for contender in CONTENDERS}
    for job in JOBS.values():
        there = {c.system for c in job.contenders} | {c.system for c in CONTENDERS if c.name in job.left_out}
        assert there == systems


def test_summaries_are_over_all_rounds_of_all_runs() -> None:
    runs = [a_run("mlp", "raypfl", [1.0, 5.0], startup=2.0, memory=7), a_run("mlp", "raypfl", [3.0], startup=4.0)]
    row = report.summarise(runs)["mlp"]["raypfl"]
    assert (row.median, row.best, row.startup, row.memory, row.rounds, row.runs) == (3.0, 1.0, 3.0, 7, 3, 2)


def test_a_run_without_rounds_stays_in_the_table_with_its_reason() -> None:
    runs = [a_run("mlp", FLOWER.name, [], startup=None, memory=None, problem="No round was finished within 150 s.")]
    text = report.page(results(*runs))
    assert f"| {FLOWER.name} | — | — |" in text
    assert f"- {FLOWER.name}: No round was finished within 150 s." in text


def test_targets_are_judged_from_the_numbers() -> None:
    target = next(t for t in report.TARGETS if t.above == ("mlp", (PFL.name,)))
    for theirs, met in ((6.0, True), (5.9, False)):
        runs = [a_run("mlp", PFL.name, [theirs]), a_run("mlp", INLINE.name, [1.0]), a_run("mlp", BARE.name, [9.0])]
        ratio = target.measured(report.summarise(runs))
        assert ratio == pytest.approx(theirs)
        assert target.is_met(ratio) is met
    assert target.measured(report.summarise([a_run("mlp", PFL.name, [6.0])])) is None


def test_a_target_may_be_an_upper_bound_of_start_up() -> None:
    target = next(t for t in report.TARGETS if t.value == "startup" and t.above[0] == "cnn")
    runs = [a_run("cnn", "raypfl, 2 actors", [9.0], startup=4.0), a_run("cnn", FLOWER.name, [1.0], startup=10.0)]
    ratio = target.measured(report.summarise(runs))
    assert ratio == pytest.approx(0.4) and target.is_met(ratio) and not target.is_met(0.6)


def test_every_target_can_be_measured() -> None:
    for target in report.TARGETS:
        for job, names in (target.above, target.below):
            assert set(names) & {c.name for c in JOBS[job].contenders}


def test_versions_that_differ_are_told_apart() -> None:
    text = report.page(results(a_run("mlp", BARE.name, [1.0])))
    assert "torch 2.15.0; Ray 2.55 (flower), 2.60 (raypfl)." in text


def test_systems_are_compared_on_as_many_processes_too() -> None:
    assert all(ours.system == "raypfl" and ours.processes == theirs.processes for ours, theirs in report.ALIKE)
    contenders = (INLINE, ACTORS, PFL, PFL_TWO, FLOWER, BARE)
    medians = (1.0, 2.0, 3.0, 8.0, 30.0, 9.0)
    runs = [a_run("mlp", c.name, [median]) for c, median in zip(contenders, medians, strict=True)]
    text = report.page(results(*runs))
    assert f"| {PFL.name} / {INLINE.name} | {FLUKE.name} / {INLINE.name} | {PFL_TWO.name} / {ACTORS.name} |" in text
    assert "| `mlp` | 3.00x | — | 4.00x | 15.00x |" in text


def test_nothing_is_said_of_as_many_processes_where_only_one_side_was_measured() -> None:
    assert "as many processes" not in report.page(results(a_run("mlp", INLINE.name, [1.0]))).lower()


def test_the_page_tells_of_which_commits_its_runs_are_and_when_they_were_made() -> None:
    other = {"commit": "def5678-dirty", "date": "2026-11-21T00:10Z", "load": 1.26}
    runs = [a_run("mlp", BARE.name, [1.0], **about) for about in ({}, {"date": "2026-11-22T08:00Z"}, other)]
    said = (
        "Runs are of commit abc1234 (2026-11-20 to 2026-11-22), commit def5678-dirty (2026-11-21); "
        "load averages as they began: 0.0 to 1.3."
    )
    assert said in report.page(results(*runs))


def test_the_readme_has_each_system_at_its_fastest() -> None:
    runs = [a_run(job, c.name, [2.0]) for job in report.IN_SHORT for c in (BARE, INLINE, PFL)]
    runs += [a_run(job, c.name, [1.234]) for job in report.IN_SHORT for c in (ACTORS, PFL_TWO)]
    runs += [a_run("mlp", FLOWER.name, []), a_run("mlp", BF16.name, [0.1])]
    lines = report.summary(results(*runs)).splitlines()
    assert lines[:2] == [
        "| | bare PyTorch loop | raypfl | Flower | pfl-research | fluke |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    assert lines[2] == "| MLP of 9,610, 50 of 1,000 clients | 2 | **1.2** | over 150 | 1.2 | — |"
    assert "| — | **—** |" in report.summary(results(runs[0]))


def test_the_page_tells_what_raypfls_trial_chose() -> None:
    one = {"notes": {"executor": "sequential", "channels_last": True}}
    other = {"notes": {"executor": "sequential", "channels_last": False}}
    runs = [a_run("cnn", INLINE.name, [1.0]) | notes for notes in (one, one, other)]
    assert "- raypfl: chose sequential, channels last in 2 of 3 runs; sequential in 1 of 3 runs." in report.page(
        results(*runs)
    )
    assert "- raypfl: chose sequential, channels last.\n" in report.page(results(*runs[:2]))
    assert "chose" not in report.page(results(a_run("cnn", INLINE.name, [1.0]) | {"notes": {}}))


def test_the_page_keeps_what_stands_around_the_table() -> None:
    document = "before\n<!-- peers -->\nold\n<!-- /peers -->\nafter\n"
    assert report.insert(document, "new\n") == "before\n<!-- peers -->\nnew\n<!-- /peers -->\nafter\n"
    with pytest.raises(ValueError, match="no place for the table"):
        report.insert("before\n", "new\n")


def test_the_picture_is_drawn_for_whatever_was_measured(tmp_path: Path) -> None:
    report.draw(results(a_run("mlp", BARE.name, [1.0]), a_run("mlp", FLOWER.name, [])), tmp_path / "new" / "peers.png")
    assert (tmp_path / "new" / "peers.png").read_bytes().startswith(b"\x89PNG")


def test_going_on_measures_what_is_missing_and_contenders_take_turns() -> None:
    job = JOBS["evaluation"]
    done = [{"job": job.name, "contender": INLINE.name, "repeat": 0}]
    left = [(repeat, c.name) for repeat, _, c in missing(done, [job], ("bare", "raypfl"), 2)]
    ours = [c.name for c in job.contenders if c.system == "raypfl"]
    assert left == [(0, BARE.name), *((0, n) for n in ours[1:]), (1, BARE.name), *((1, n) for n in ours)]


def test_a_contender_is_left_out_where_the_cpu_lacks_what_it_needs() -> None:
    assert is_possible(BARE)
    assert not is_possible(Contender("other", "bare", needs=("no such flag",)))


def test_the_machine_is_described_without_its_name() -> None:
    import platform

    assert platform.node() not in json.dumps(machine())


def test_a_missing_uv_is_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(environments.Unavailable, match="no uv beside python or on the PATH"):
        environments.find_uv()


def test_an_environment_that_is_ready_is_not_built_again(tmp_path: Path) -> None:
    (tmp_path / "flower").mkdir()
    (tmp_path / "flower" / "ready.json").write_text('{"flwr": "1.0"}')
    assert environments.environment("flower", tmp_path).versions == {"flwr": "1.0"}


def test_an_installation_that_fails_leaves_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    uv = tmp_path / "uv"
    uv.write_text("#!/bin/sh\necho no such package\nexit 2\n")
    uv.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(environments.Unavailable, match="could not be installed: `uv venv` says: no such package"):
        environments.environment("fluke", tmp_path / "made")


def test_modules_are_compiled_before_they_are_timed(tmp_path: Path) -> None:
    made = tmp_path / "made"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(made)], check=True)
    python = str(made / "bin" / "python")
    packages = next((made / "lib").glob("python*/site-packages"))
    for folder in (packages, tmp_path):
        (folder / "module.py").write_text("answer = 42\n")
    (packages / "template.py").write_text("{{ no Python }}\n")
    environments.compile_modules(python, tmp_path)
    for folder in (packages, tmp_path):
        assert Path(importlib.util.cache_from_source(str(folder / "module.py"))).exists()


def test_a_measured_process_keeps_the_bytecode_that_it_compiles(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    command = [sys.executable, "-c", "import sys; print('kept:', not sys.dont_write_bytecode)"]
    assert "kept: True" in str(measure(command, tmp_path / "report", Patience(limit=30.0)).problem)


def test_what_a_measured_process_leaves_behind_is_removed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import tempfile; print('in', tempfile.mkdtemp())"]
    problem = str(measure(command, tmp_path / "report", Patience(limit=30.0)).problem)
    left = Path(problem.rpartition(" in ")[2])
    assert left.name.startswith("tmp") and not left.exists()


SCRIPT = """
import subprocess, sys, time
from benchmarks.peers.order import Stamps
Stamps(sys.argv[1]).note(executor="sequential")
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print(other.pid, flush=True)
while True:
    time.sleep(0.02)
    Stamps(sys.argv[1]).add()
"""


def test_a_run_is_stopped_with_all_that_it_started_once_enough_is_counted(tmp_path: Path) -> None:
    patience = Patience(settle=0.0, rounds=2, seconds=0.0, limit=30.0)
    report_file = tmp_path / "report"
    run = measure([sys.executable, "-c", SCRIPT, str(report_file)], report_file, patience)
    assert run.problem is None and run.startup is not None and len(run.rounds) >= 2
    assert run.notes == {"executor": "sequential"}
    if Path("/proc").exists():
        other = int((tmp_path / "report.log").read_text())
        assert run.memory and run.memory > 0
        assert not Path(f"/proc/{other}/cmdline").exists() or not Path(f"/proc/{other}/cmdline").read_text()


def test_a_run_that_ends_by_itself_says_its_last_line(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; print('out of luck'); sys.exit(3)"]
    run = measure(command, tmp_path / "report", Patience(limit=30.0))
    assert run.problem == "It ended by itself with exit code 3. Its last line: out of luck"
    assert run.rounds == [] and run.startup is None


def test_a_run_that_finishes_no_round_in_time_is_said_to(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert measure(command, tmp_path / "report", Patience(limit=0.5)).problem == "No round was finished within 0 s."


@pytest.mark.skipif(not Path("/proc").exists(), reason="needs /proc")
def test_a_process_is_told_from_a_later_one_with_its_number() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        found = descendants(child.pid)
        assert [process.pid for process in found] == [child.pid]
        assert all(process.began > 0 for process in found)
    finally:
        child.communicate(b"\n")
    assert descendants(child.pid) == set()
