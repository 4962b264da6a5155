"""Other systems get the same work as raypfl, and the tables follow from the runs."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import raypfl
from benchmarks import networks
from benchmarks.noise import SETS, Noise
from benchmarks.peers import report
from benchmarks.peers.__main__ import PAGE, README, RESULTS, missing
from benchmarks.peers.data import prepare, store
from benchmarks.peers.jobs import ACTORS, BARE, BF16, CONTENDERS, FLOWER, INLINE, JOBS, PFL, PFL_TWO, Contender
from benchmarks.peers.measure import Patience, measure, parse
from benchmarks.peers.order import Order, Shards, Stamps, fit
from benchmarks.peers.systems import bare
from benchmarks.peers.systems.raypfl import experiment, note_choice
from raypfl.data import load_federated
from raypfl.models import MODELS

pytestmark = pytest.mark.thorough


@pytest.fixture
def order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Order:
    monkeypatch.setitem(SETS, "tiny", Noise("tiny", 6, (1, 8, 8), 3, 9, tests=2))
    job = replace(JOBS["mlp"], noise=SETS["tiny"], batch=2)
    return job.order(INLINE, *prepare(job.noise, tmp_path), tmp_path / "report", cohort=3)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", ["cnn", "lenet", "mlp"])
def test_the_networks_of_contenders_are_raypfls_bit_for_bit(name, layout):
    images = torch.randn(4, 3, 32, 32).contiguous(memory_format=layout)
    labels = torch.randint(0, 10, (4,))

    computed = []
    for build in (partial(networks.network, name), MODELS.get(name)):
        torch.manual_seed(0)
        net = build(input_shape=(3, 32, 32), num_classes=10)
        loss = torch.nn.functional.cross_entropy(net(images), labels)
        computed.append([loss, *torch.autograd.grad(loss, list(net.parameters()))])

    assert all(torch.equal(theirs, ours) for theirs, ours in zip(*computed, strict=True))


@pytest.mark.parametrize(("name", "resident"), [("tiny", True), ("tiny", False), ("described", False)])
def test_every_system_gets_the_samples_that_raypfl_gets(order, tmp_path, monkeypatch, name, resident):
    monkeypatch.setattr("benchmarks.peers.order.RESIDENT", 1 << 30 if resident else 0)
    monkeypatch.setitem(SETS, "described", Noise("described", 6, (3, 8, 8), 5, 5))
    described = raypfl.Experiment(**SETS[name].source(store(tmp_path)))
    _, files = prepare(SETS[name], tmp_path)
    data = load_federated(described.data, described.partition, seed=0)

    for split in ("train", "test"):
        shards = Shards(str(files), split)
        assert np.array_equal(shards.sizes, data.sizes(split))
        for client in range(data.num_clients):
            x, y = shards.client(client)
            inputs, labels = data.take(data.indices(client, split))
            normalised = (inputs / data.scale - data.mean[:, None, None]) / data.std[:, None, None]
            assert np.allclose(x.numpy(), normalised, atol=1e-5) and np.array_equal(y.numpy(), labels)


@pytest.mark.parametrize("job", JOBS.values(), ids=lambda job: job.name)
def test_raypfl_does_the_work_of_the_job(job, tmp_path):
    for contender in job.contenders:
        if contender.system != "raypfl":
            continue

        order = job.order(contender, job.noise.source(tmp_path), tmp_path, tmp_path / "report", job.cohort)
        described = experiment(order, str(tmp_path))
        training = described.training
        assert (training.lr, training.momentum, training.batch_size) == (job.lr, job.momentum, job.batch)
        assert (training.epochs, described.cohort.size) == (job.epochs, job.cohort)
        assert described.partition.clients == job.noise.clients
        assert (described.engine.backend == "ray") == (contender.processes > 1)


def test_a_job_names_every_system_or_says_why_not():
    for job in JOBS.values():
        measured = {contender.system for contender in job.contenders}
        left_out = {contender.system for contender in CONTENDERS if contender.name in job.left_out}
        assert measured | left_out == {contender.system for contender in CONTENDERS}


def test_local_training_takes_the_jobs_steps_with_dittos_pull(order):
    twice = replace(order, batch=5, epochs=2, lr=0.1, momentum=0.0, lam=0.5)
    x = torch.randn(5, 4)
    y = torch.zeros(5, dtype=torch.long)
    net = torch.nn.Linear(4, 10)
    anchor = [torch.ones_like(p) for p in net.parameters()]

    expected = copy.deepcopy(net)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        distance = sum((p - a).square().sum() for p, a in zip(expected.parameters(), anchor, strict=True))
        (torch.nn.functional.cross_entropy(expected(x), y) + twice.lam / 2 * distance).backward()
        optimizer.step()

    fit(net, x, y, twice, anchor)
    assert all(torch.allclose(p, q, atol=1e-6) for p, q in zip(net.parameters(), expected.parameters(), strict=True))


@pytest.mark.parametrize("method", ["fedavg", "ditto", "evaluation"])
def test_raypfl_reports_its_rounds_and_which_executor_it_chose(order, method, tmp_path):
    everybody = replace(order, method=method, cohort=order.clients)
    raypfl.run(experiment(everybody, str(tmp_path)).replace(rounds=3), listeners=[partial(note_choice, order.report)])
    stamps = [json.loads(text) for text in Path(order.report).read_text().splitlines()]
    assert len(stamps) == (2 if method == "evaluation" else 3)
    assert all((stamp["begin"] is None) == (method != "evaluation") for stamp in stamps)
    notes = Stamps(order.report).notes()
    assert notes["executor"] in ("sequential", "vectorised") and isinstance(notes["channels_last"], bool)


@pytest.mark.parametrize("method", ["fedavg", "ditto", "evaluation"])
def test_the_bare_loop_reports_its_rounds(order, method, monkeypatch):
    begins: list[float | None] = []

    def add(self: Stamps, begin: float | None = None) -> None:
        begins.append(begin)
        if len(begins) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Stamps, "add", add)
    with pytest.raises(KeyboardInterrupt):
        bare.run(replace(order, method=method))
    assert all((begin is None) == (method != "evaluation") for begin in begins)


def test_the_bare_evaluation_runs_each_clients_own_network_on_its_own_samples(order):
    shards = Shards(order.files, "test")
    pairs = bare.prepared(order)
    assert len(pairs) == order.clients and not any(model.training for model, _ in pairs)
    assert all(torch.equal(batch, shards.client(client)[0]) for client, (_, batch) in enumerate(pairs))
    assert len({next(model.parameters()).sum().item() for model, _ in pairs}) == order.clients


def test_rounds_count_from_when_the_run_has_settled():
    stamps = ((None, 10), (None, 11), (None, 13), (15, 16))
    lines = [json.dumps({"begin": begin, "end": end}) + "\n" for begin, end in stamps]
    assert parse([*lines, '{"begin": null, "e'], started=4, settle=0.5) == (6, [2, 1])
    assert parse(lines, started=4, settle=0.0) == (6, [1, 2, 1]) and parse([], started=4, settle=0.0) == (None, [])


def record(job: str, contender: Contender, rounds: list[float], **changes: Any) -> dict[str, Any]:
    """A run in the results."""
    measured = {"startup": 4.0, "rounds": rounds, "memory": 1, "problem": None}
    origin = {"commit": "abc1234", "date": "2026-11-20T23:50Z", "load": 0.04}
    return {"job": job, "contender": contender.name, **measured, **origin} | changes


def results(*runs: dict[str, Any]) -> dict[str, Any]:
    versions = {
        "flower": {"flwr": "1.2.3", "torch": "2.15.0", "ray": "2.55"},
        "raypfl": {"torch": "2.15.0", "ray": "2.60"},
    }
    machine = {"cpu": "a CPU", "cores": 2, "memory_gib": 4.0}
    return {"machine": machine, "versions": versions, "left_out": {}, "runs": list(runs)}


def test_the_page_follows_from_all_rounds_of_all_runs():
    notes = [{"notes": {"executor": "sequential", "channels_last": last}} for last in (True, False)]
    later = {"commit": "def5678-dirty", "date": "2026-11-21T00:10Z", "load": 1.26}
    runs = [
        record("mlp", INLINE, [2.0, 1.0], **notes[0], memory=3 << 30),
        record("mlp", INLINE, [0.5], **notes[1] | later),
    ]
    for contender, seconds in ((ACTORS, 2.0), (PFL, 6.0), (PFL_TWO, 8.0), (BARE, 9.0)):
        runs.append(record("mlp", contender, [seconds]))
    runs.append(record("mlp", FLOWER, [30.0], startup=10.0))

    text = report.page(results(*runs))

    assert "| raypfl | 1 | 0.5000 | 9.00x | 4.0 | 3.00 GiB | 3 in 2 |" in text
    assert "| `mlp`: raypfl's fastest in fp32 against pfl-research's one process | ≥ 6x | 6.00x | met |" in text
    assert "| `mlp`: start-up to the end of the first round, relative to Flower's | ≤ 0.5x | 0.40x | met |" in text
    assert "| `mlp` | 6.00x | — | 4.00x | 15.00x |" in text  # on as many processes
    assert "- raypfl: chose sequential, channels last in 1 of 2 runs; sequential in 1 of 2 runs." in text
    assert "torch 2.15.0; Ray 2.55 (flower), 2.60 (raypfl)." in text
    assert (
        "Runs of commit abc1234 (2026-11-20), commit def5678-dirty (2026-11-21); "
        "load averages at their start: 0.0 to 1.3."
    ) in text


def test_targets_without_a_measurement_are_not_judged_and_a_failure_keeps_its_reason():
    text = report.page(results(record("mlp", FLOWER, [], startup=None, memory=None, problem="Out of luck.")))
    assert f"| {FLOWER.name} | — | — |" in text and f"- {FLOWER.name}: Out of luck." in text
    assert "against pfl-research's one process | ≥ 6x | — | not measured |" in text
    assert "as many processes" not in text.lower() and "chose" not in text


def test_the_readmes_table_has_each_system_at_its_fastest():
    runs = [record("mlp", contender, [2.0]) for contender in (BARE, INLINE, PFL)]
    runs += [record("mlp", contender, [1.234]) for contender in (ACTORS, PFL_TWO)]
    text = report.summary(results(*runs, record("mlp", FLOWER, []), record("mlp", BF16, [0.1])))
    assert text.startswith("| | bare PyTorch loop | raypfl | Flower | pfl-research | fluke |\n| --- |")
    assert "| MLP of 9,610, 50 of 1,000 clients | 2 | **1.2** | over 150 | 1.2 | — |" in text


def test_the_readme_and_the_page_say_what_was_measured():
    measured = json.loads(RESULTS.read_text())
    for file, text in ((README, report.summary(measured)), (PAGE, report.page(measured))):
        document = file.read_text()
        assert report.insert(document, text) == document, f"{file} is out of date: make peers"


def test_a_table_replaces_the_one_on_the_page():
    document = "before\n<!-- peers -->\nold\n<!-- /peers -->\nafter\n"
    assert report.insert(document, "new\n") == document.replace("old", "new")
    with pytest.raises(ValueError, match="no place for the table"):
        report.insert("before\n", "new\n")


def test_the_picture_is_drawn_for_whatever_was_measured(tmp_path):
    report.draw(results(record("mlp", BARE, [1.0]), record("mlp", FLOWER, [])), tmp_path / "new" / "peers.png")
    assert (tmp_path / "new" / "peers.png").read_bytes().startswith(b"\x89PNG")


def test_missing_runs_are_measured_and_contenders_take_turns():
    job = JOBS["evaluation"]
    measured = [{"job": job.name, "contender": INLINE.name, "repeat": 0}]
    order = [(repeat, contender.name) for repeat, _, contender in missing(measured, [job], ("bare", "raypfl"), 2)]
    assert order == [(0, BARE.name), (0, ACTORS.name), (1, BARE.name), (1, INLINE.name), (1, ACTORS.name)]


SCRIPT = """
import subprocess, sys, tempfile, time
from benchmarks.peers.order import Stamps
Stamps(sys.argv[1]).note(executor="sequential")
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print(other.pid, tempfile.mkdtemp(), flush=True)
while True:
    time.sleep(0.02)
    Stamps(sys.argv[1]).add()
"""


def test_a_run_with_enough_rounds_is_stopped_with_all_processes_that_it_started(tmp_path):
    patience = Patience(settle=0.0, rounds=2, seconds=0.0, limit=30.0)
    run = measure([sys.executable, "-c", SCRIPT, str(tmp_path / "report")], tmp_path / "report", patience)
    assert run.problem is None and run.startup is not None and len(run.rounds) >= 2
    assert asdict(run)["notes"] == {"executor": "sequential"}

    grandchild, temporary_folder = (tmp_path / "report.log").read_text().split()
    assert not Path(temporary_folder).exists()
    if Path("/proc").exists():
        assert run.memory and run.memory > 0
        is_gone = subprocess.run(["kill", "-0", grandchild], capture_output=True).returncode != 0
        assert is_gone or not Path(f"/proc/{grandchild}/cmdline").read_text()  # a zombie has no command line


@pytest.mark.parametrize(
    ("code", "limit", "problem"),
    [
        ("import sys; print('out of luck'); sys.exit(3)", 30.0, "exit code 3. Its last line: out of luck"),
        ("import time; time.sleep(60)", 0.5, "No round was finished within 0 s."),
    ],
)
def test_a_run_without_a_round_says_why(tmp_path, code, limit, problem):
    run = measure([sys.executable, "-c", code], tmp_path / "report", Patience(limit=limit))
    assert str(run.problem).endswith(problem) and run.rounds == [] and run.startup is None
