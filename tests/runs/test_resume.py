"""A resume never falsifies a run: settings that decide a result stay, and the history tells what was in force when."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import raypfl
from raypfl.common.errors import CheckpointError, ConfigError, NoRun, Stopped
from raypfl.common.stopping import StopRequest
from raypfl.engine import history
from raypfl.engine.backends.shipment import Shipment
from raypfl.engine.events import Event, RunStarted, Warned
from raypfl.experiment import Experiment
from raypfl.experiment.assignments import assign, flatten
from raypfl.learning.packing import Packer
from raypfl.learning.recording.python_state import names_in
from raypfl.methods import METHODS, FedAvg
from raypfl.runs.driver import run
from raypfl.runs.resuming import MAY_CHANGE, may_change, refuse_changes
from raypfl.runs.together import Place
from tests.support.command import raypfl as command
from tests.support.command import raypfl_json
from tests.support.pages import ROOT
from tests.support.runs import ON_RAY, Interrupt, experiment

KEEP_ALL = {"checkpoint__keep": 100, "checkpoint__every": 1}


def file_contents(folder: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def other_values(value: Any) -> Iterator[Any]:
    """Other values that may be valid for a setting with this value."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield from (value + 1, value * 0.5, value + 0.25)
    elif value is None:
        yield from (1, 0.5, "elsewhere", True)
    elif isinstance(value, str):
        yield from ("b.pt",) if value.endswith(".pt") else ()
        yield from ("merged", "own", "cnn", "adam", "fp64", "max", "skip", "sequential", "client", "ray", "other")
    elif isinstance(value, list):
        yield from (["local"], ["loss"], ["flip"], [3])


def changed_in_one_setting(original: Experiment) -> Iterator[tuple[str, Experiment]]:
    """Valid experiments that differ from `begun` in one setting, with its name."""
    for key, value in flatten(original.to_dict()).items():
        for other in other_values(value):
            values = original.to_dict()
            assign(values, key.split("."), other)

            try:
                variant = Experiment(**values)
            except ConfigError:
                continue

            if variant != original:
                yield key, variant
                break


def test_every_setting_that_decides_a_result_stays(tmp_path):
    validated = {"evaluation__protocols": "[local,val]", "evaluation__patience": 2, "data__val_fraction": 0.2}
    original = experiment(tmp_path, privacy__noise=1, model__weights="a.pt", **validated)
    variants = dict(changed_in_one_setting(original))
    refused = set()
    for key, variant in variants.items():
        try:
            refuse_changes(tmp_path, variant, original)
        except ConfigError as error:
            assert key in str(error)
            refused.add(key)

    tried = set(variants)
    assert tried - refused == {key for key in tried if may_change(key)}
    assert len(refused) > 40 and {"training.lr", "seed", "engine.executor", "method.lam", "data.val_fraction"} < refused
    assert {key.partition(".")[0] for key in tried - refused} == {key.partition(".")[0] for key in MAY_CHANGE}


def test_the_guide_lists_what_a_resume_may_change():
    page = (ROOT / "docs/command_line.md").read_text()
    listed = page.partition("A resume may change only these settings")[2].partition("To change anything else")[0]
    of_pools = {f"data.pools.*.{key}" for key in re.findall(r"`(root|download)`", listed)}
    settings = set(re.findall(r"`([\w.]+(?:\.\*)?)`", listed)) - {"root", "download"}
    assert settings | of_pools == set(MAY_CHANGE)


@pytest.fixture(scope="module")
def short_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two rounds, which tests leave as it is."""
    return raypfl.run(experiment(tmp_path_factory.mktemp("short"), rounds=2)).run_dir


@pytest.mark.parametrize("change", ["training.lr=0.5", "model.hidden=[7]", "partition.alpha=5", "name=other"])
def test_a_change_that_would_falsify_a_run_is_refused_and_nothing_is_written(short_run, change):
    run = short_run
    before = file_contents(run)
    for words in ([change], [change, "rounds=4"]):
        with pytest.raises(ConfigError, match=f"^{change.partition('=')[0]} "):
            raypfl.resume(run, overrides=words)
        refused = command("resume", str(run), *words)
        assert refused.exit_code == 2 and change.partition("=")[0] in refused.stderr

    assert file_contents(run) == before


def test_the_refusal_says_how_to_change_it_in_a_new_run(tmp_path):
    run = raypfl.run(experiment(tmp_path, rounds=2)).run_dir
    with pytest.raises(ConfigError) as refused:
        raypfl.resume(run, overrides=["training.lr=0.5", "rounds=4"])
    (suggested,) = re.findall(r"`raypfl (resume .*?)`", str(refused.value))
    words = suggested.split()
    assert raypfl_json(*words)["runs"][0]["experiment"]["rounds"] == 4


def test_a_finished_run_that_is_resumed_without_a_change_stays_as_it_is(tmp_path):
    finished = raypfl.run(experiment(tmp_path, rounds=2))
    before = file_contents(finished.run_dir)
    for words in ([], ["training.lr=0.1"], ["tracking.experiment=other", "checkpoint.keep=5"]):
        assert raypfl.resume(finished.run_dir, overrides=words).weights_hash == finished.weights_hash
        assert file_contents(finished.run_dir) == before
    assert raypfl_json("resume", str(finished.run_dir))["runs"][0]["weights_hash"] == finished.weights_hash

    # The command draws a picture, and changes nothing else.
    after = file_contents(finished.run_dir)
    after.pop(finished.run_dir / "picture.png", None)
    assert after == before


def test_more_rounds_are_refused_where_they_would_have_changed_the_rounds_before(tmp_path):
    cosine = experiment(tmp_path, training__schedule="cosine")
    stopped = raypfl.run(cosine, listeners=[Interrupt(2)])
    assert stopped.status == "stopped"
    with pytest.raises(ConfigError, match=r"rounds is 6 .* not 8.* training.schedule='cosine'"):
        raypfl.resume(stopped.run_dir, overrides=["rounds=8"])
    assert raypfl.resume(stopped.run_dir).weights_hash == raypfl.run(cosine).weights_hash


class Fading(FedAvg):
    """Clients count less in later rounds."""

    def round(self, server, cohort):
        before = server["theta"]
        super().round(server, cohort)
        server["theta"] = torch.lerp(server["theta"], before, cohort.round / cohort.task.rounds)


class Counting(FedAvg):
    """Logs how many rounds are left, on which nothing depends."""

    def round(self, server, cohort):
        super().round(server, cohort)
        cohort.log(left=cohort.task.rounds - cohort.round)

    def depends_on_rounds(self):
        return False


@pytest.mark.parametrize("method", ["fedphp", {"name": "floco", "endpoints": 3}, f"{__name__}:Fading"])
def test_more_rounds_are_refused_where_the_methods_rounds_depend_on_their_number(tmp_path, method):
    run = raypfl.run(experiment(tmp_path, method=method, rounds=2)).run_dir
    with pytest.raises(ConfigError, match=r"rounds is 2 .* not 4.* number.* its 2 rounds would have been different"):
        raypfl.resume(run, overrides=["rounds=4"])


def test_a_method_that_only_tells_of_the_number_of_rounds_can_be_extended(tmp_path):
    method = f"{__name__}:Counting"
    run = raypfl.run(experiment(tmp_path, method=method, rounds=1)).run_dir
    longer = raypfl.resume(run, overrides=["rounds=2"])
    assert longer.weights_hash == raypfl.run(experiment(tmp_path, method=method, rounds=2)).weights_hash


def test_the_methods_whose_rounds_depend_on_their_number_say_so():
    depending, reading = set(), set()
    for name in METHODS:
        method = METHODS.get(name)
        functions = [value for owner in method.__mro__ for value in vars(owner).values() if hasattr(value, "__code__")]
        depending |= {name} if method().depends_on_rounds() else set()
        reading |= {name} if any("rounds" in names_in(function.__code__) for function in functions) else set()
    # The others draw a picture in the last round, and in some before.
    assert reading - depending == {"extra-images", "fednh", "fedptr", "fedptr-s"}
    assert depending == {"apple", "fedkd", "fedphp", "floco", "floco-plus", "pfedsim"}


def test_a_location_without_the_runs_checkpoints_is_refused(tmp_path, default_run):
    run = raypfl.run(experiment(tmp_path, rounds=2)).run_dir
    with pytest.raises(ConfigError, match=r"checkpoint.location .* has no checkpoint of this run"):
        raypfl.resume(run, overrides=["rounds=4", f"checkpoint.location={tmp_path / 'empty'}"])

    moved = tmp_path / "moved" / run.name
    moved.parent.mkdir()
    (run / "checkpoints").rename(moved)
    longer = raypfl.resume(run, overrides=["rounds=6", f"checkpoint.location={moved.parent}"])

    assert longer.weights_hash == default_run.weights_hash


def test_the_history_tells_the_settings_of_each_round(tmp_path):
    stopped = raypfl.run(experiment(tmp_path, rounds=4), listeners=[Interrupt(3)])
    raypfl.resume(stopped.run_dir, overrides=["checkpoint.keep=7"])
    longer = raypfl.resume(stopped.run_dir, overrides=["rounds=6"])

    assert [entry["from_round"] for entry in longer.history] == [0, 3, 4]
    assert [entry["changed"] for entry in longer.history] == [{}, {"checkpoint.keep": 7}, {"rounds": 6}]
    assert [entry["settings"]["rounds"] for entry in longer.history] == [4, 4, 6]
    assert Experiment(**longer.history[-1]["settings"]) == longer.experiment
    assert longer.history[-1]["metadata"] == longer.metadata

    head = (longer.run_dir / "experiment.yaml").read_text().splitlines()[0]
    assert head == "# In force after round 4; history.jsonl says what was before."
    assert Experiment.from_yaml(longer.run_dir / "experiment.yaml") == longer.experiment


def test_a_damaged_history_loses_the_damaged_lines_only(tmp_path):
    run = raypfl.run(experiment(tmp_path, rounds=1)).run_dir
    file = run / "history.jsonl"
    begun = file.read_bytes()
    file.write_bytes(b"\xff" + begun + begun[:-20])
    history.add(run, 1, experiment(tmp_path, rounds=2))
    assert [entry["from_round"] for entry in history.read(run)] == [1]

    file.write_bytes(begun + begun[:-20])
    history.add(run, 1, experiment(tmp_path, rounds=2))
    assert [entry["from_round"] for entry in history.read(run)] == [0, 1]


def test_a_run_whose_checkpoints_are_gone_says_that_it_begins_again(tmp_path):
    located = experiment(tmp_path, rounds=1, checkpoint__location=tmp_path / "apart")
    before = raypfl.run(located, run_dir=tmp_path / "before")
    before.run_dir.rename(tmp_path / "after")
    warnings: list[str] = []
    again = raypfl.resume(
        tmp_path / "after",
        overrides=["rounds=2"],
        listeners=[lambda event: warnings.append(event.text) if isinstance(event, Warned) else None],
    )
    assert again.round == 2 and f"no checkpoint in {tmp_path}/apart/after: it begins again" in warnings[0]
    assert len(warnings) == 1


def test_a_run_that_was_stopped_before_its_first_round_begins_again_without_a_warning(tmp_path):
    def interrupt(event: Event) -> None:
        if isinstance(event, RunStarted):
            os.kill(os.getpid(), signal.SIGINT)

    stopped = raypfl.run(experiment(tmp_path, rounds=1), listeners=[interrupt])
    assert (stopped.status, stopped.round) == ("stopped", 0)

    events: list[Event] = []
    assert raypfl.resume(stopped.run_dir, listeners=[events.append]).round == 1
    assert not [event for event in events if isinstance(event, Warned)]


def test_a_run_that_had_rounds_after_it_was_stopped_at_once_says_that_they_are_lost(tmp_path):
    def stop(event: Event) -> None:
        if isinstance(event, RunStarted):
            raise Stopped

    run = raypfl.run(experiment(tmp_path, rounds=1), listeners=[stop]).run_dir
    summaries: list[bool] = []
    raypfl.resume(run, listeners=[lambda event: summaries.append((run / "summary.json").exists())])
    # As if it had been killed in its last round: what it wrote at its end is not there.
    (run / "summary.json").unlink()
    shutil.rmtree(run / "checkpoints")
    events: list[Event] = []
    raypfl.resume(run, listeners=[events.append])
    assert not summaries[-1]
    assert [event for event in events if isinstance(event, Warned) and "it begins again" in event.text]


def test_a_run_that_is_asked_to_stop_while_it_is_prepared_beside_others_does_not_begin(tmp_path):
    stop = StopRequest()

    def ask(event: Event) -> None:
        stop.received = True

    with pytest.raises(KeyboardInterrupt):
        run(experiment(tmp_path), run_dir=tmp_path / "run", listeners=[ask], place=Place(Packer(1), 0, stop))
    assert not history.read(tmp_path / "run")


@pytest.mark.thorough
@pytest.mark.usefixtures("ray_cluster")
def test_a_run_on_ray_that_is_asked_to_stop_while_its_server_starts_does_not_begin(tmp_path, monkeypatch):
    pack = Shipment.pack

    def pack_and_ask(*arguments) -> Shipment:
        os.kill(os.getpid(), signal.SIGINT)
        return pack(*arguments)

    settings = experiment(tmp_path, rounds=1, **ON_RAY)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Shipment, "pack", pack_and_ask)
        run(settings, run_dir=tmp_path / "run")
    assert not history.read(tmp_path / "run")
    assert raypfl.resume(tmp_path / "run").weights_hash == raypfl.run(settings).weights_hash


class MovesItsAnchor(FedAvg):
    """FedAvg that writes into the memory of the model with which it began."""

    def start(self, task):
        theta = task.model.init(task.seed)
        return {"theta": theta, "anchor": theta}

    def round(self, server, cohort):
        theta = cohort.run(self.train, theta=server["theta"])["theta"]
        server["theta"].add_(theta - server["anchor"])


def test_a_method_whose_tensors_share_memory_is_resumed_to_the_same_bits(tmp_path):
    described = experiment(tmp_path, method="tests.runs.test_resume:MovesItsAnchor", rounds=2, evaluation__every=0)
    whole = raypfl.run(described)
    stopped = raypfl.run(described, listeners=[Interrupt(1)])
    assert stopped.round == 1 and raypfl.resume(stopped.run_dir).weights_hash == whole.weights_hash


def test_a_run_that_continues_another_from_a_round_names_it_and_leaves_it_as_it_was(tmp_path):
    parent = raypfl.run(experiment(tmp_path, **KEEP_ALL))
    before = file_contents(parent.run_dir)
    same = raypfl.resume(parent.run_dir, from_round=4, new_run_dir=tmp_path / "same")

    assert same.weights_hash == parent.weights_hash

    lower = raypfl.resume(
        parent.run_dir, from_round=4, new_run_dir=tmp_path / "lower", overrides=["training.lr=0.001", "rounds=8"]
    )

    assert file_contents(parent.run_dir) == before

    from_scratch = [raypfl.run(experiment(tmp_path, training__lr=0.001, rounds=rounds)) for rounds in (4, 8)]
    assert len({run.weights_hash for run in (parent, lower, *from_scratch)}) == 4
    assert lower.round == 8 and lower.experiment.training.lr == 0.001
    assert lower.metadata["parent"] == {"run": str(parent.run_dir), "round": 4}
    assert lower.rounds["loss"][:4].equals(parent.rounds["loss"][:4])
    assert [(entry["from_round"], entry["settings"]["training"]["lr"]) for entry in lower.history] == [
        (0, 0.1),
        (4, 0.001),
    ]
    assert "parent" not in lower.history[0] and lower.history[1]["parent"] == lower.metadata["parent"]

    head = (lower.run_dir / "experiment.yaml").read_text().splitlines()[:2]
    assert head[0].startswith("# In force after round 4;")
    assert head[1] == f"# The rounds up to 4 are those of {parent.run_dir}."


def test_a_run_that_continues_another_is_resumed_to_the_same_bits_and_keeps_its_parent(tmp_path):
    parent = raypfl.run(experiment(tmp_path, **KEEP_ALL)).run_dir
    words = {"from_round": 3, "overrides": ["method.lam=3", "rounds=8"]}
    whole = raypfl.resume(parent, new_run_dir=tmp_path / "whole", **words)
    stopped = raypfl.resume(parent, new_run_dir=tmp_path / "cut", listeners=[Interrupt(5)], **words)

    assert stopped.status == "stopped"

    resumed = raypfl.resume(stopped.run_dir)
    assert resumed.weights_hash == whole.weights_hash
    assert resumed.metadata["parent"] == whole.metadata["parent"]
    assert [entry["from_round"] for entry in resumed.history] == [0, 3, 5]


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with a checkpoint of every other round, from which others continue."""
    return raypfl.run(experiment(tmp_path_factory.mktemp("parent"), checkpoint__keep=9)).run_dir


@pytest.mark.parametrize(
    ("round", "words", "sentence"),
    [
        (3, [], r"has no checkpoint of round 3; it has those of rounds 2, 4 and 6"),
        (6, ["training.lr=0.5"], r"rounds is 6, so nothing is left to do after round 6; give more, as rounds=12"),
        (4, ["model.hidden=[7]"], r"model.hidden is \[16\] .* the checkpoint"),
        (4, ["method=fedavg"], r"method.name is 'ditto' .* the checkpoint"),
        (4, ["privacy.noise=1"], r"privacy.noise is None .* the checkpoint"),
        (4, ["partition.alpha=5"], r"partition\.alpha is .* not 5.0, and the checkpoint depends on it"),
        (4, ["training.lr=-1"], r"training.lr is -1"),
    ],
)
def test_an_impossible_continuation_is_refused_and_leaves_nothing(parent, tmp_path, round, words, sentence):
    with pytest.raises((ConfigError, CheckpointError), match=sentence):
        raypfl.resume(parent, from_round=round, new_run_dir=tmp_path / "new", overrides=words)
    assert not (tmp_path / "new").exists()


def test_the_command_continues_a_run_as_a_new_one(parent, tmp_path):
    new = tmp_path / "new"
    words = ["resume", str(parent), "--from-round", "4", "--as", str(new)]
    (run,) = raypfl_json(*words, "training.lr=0.001")["runs"]

    assert (run["run_dir"], run["experiment"]["training"]["lr"], run["status"]) == (str(new), 0.001, "finished")

    for wrong, sentence in (
        (words, f"{new} already has a run"),
        (words[:4], "--from-round needs --as"),
        ([*words[:2], *words[4:]], "--as needs --from-round"),
    ):
        refused = command(*wrong)
        assert refused.exit_code == 2 and sentence in " ".join(refused.stderr.split())


@pytest.mark.parametrize("copies", [True, False])
def test_damaged_tables_cost_no_model(tmp_path, default_run, copies):
    """One bit of each file is flipped; the rows come back from the tables in the run's folder, or are left out."""
    run = raypfl.run(experiment(tmp_path, rounds=4)).run_dir
    parts = list((run / "checkpoints" / "tables").glob("*.parquet"))

    assert {part.name.partition("-")[0] for part in parts} == {"rounds", "evaluations", "ledger"}

    for part in parts:
        flipped = bytearray(part.read_bytes())
        flipped[len(flipped) // 2] ^= 1
        part.write_bytes(flipped)

    for table in () if copies else run.glob("*.parquet"):
        table.unlink()

    events: list = []
    longer = raypfl.resume(run, overrides=["rounds=6"], listeners=[events.append])
    assert longer.weights_hash == default_run.weights_hash

    warnings = [event.text for event in events if isinstance(event, Warned)]
    assert len(warnings) == 3  # the newest checkpoint has one file of each table

    if copies:
        assert all("were written again from its copy" in text for text in warnings)
        assert longer.ledger.equals(default_run.ledger)
        assert longer.rounds["loss"].equals(default_run.rounds["loss"])
    else:
        assert all("are lost, and the run continues without them" in text for text in warnings)
        assert longer.rounds["round"].to_pylist() == [5, 6]


@pytest.mark.parametrize("name", ["summary.json", "metadata.json"])
def test_an_odd_file_in_a_runs_folder_is_reported_and_written_again(tmp_path, name):
    finished = raypfl.run(experiment(tmp_path, rounds=1, evaluation__every=1))
    for text in ("[]", "{}", "null", '"finished"', "{", '{"status": "finished"}'):
        (finished.run_dir / name).write_text(text)
        if name == "summary.json" or not text.startswith(("{}", '{"')):
            with pytest.raises(NoRun, match=rf"{name} is damaged; `raypfl resume {finished.run_dir}` writes it again"):
                raypfl.Result.load(finished.run_dir)
            raypfl.resume(finished.run_dir)
        assert raypfl.Result.load(finished.run_dir).weights_hash == finished.weights_hash


def test_a_damaged_table_of_a_finished_run_is_reported_with_what_writes_it_again(tmp_path):
    finished = raypfl.run(experiment(tmp_path, rounds=1, evaluation__every=1))
    file = finished.run_dir / "ledger.parquet"
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(NoRun, match=r"ledger.parquet is missing or damaged .* Delete .*summary.json"):
        raypfl.resume(finished.run_dir)
    (finished.run_dir / "summary.json").unlink()
    assert raypfl.resume(finished.run_dir).ledger.equals(finished.ledger)


def test_a_comparison_refuses_a_change_that_decides_its_results(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = ["rounds=1", "engine.backend=inline", "partition.clients=4", "tracking.mlflow=false"]
    raypfl_json("run", *small, "--method", "fedavg,ditto", "--run-dir", "both")
    before = file_contents(tmp_path / "both")
    refused = command("resume", "both", "training.lr=0.5", "rounds=2")

    assert refused.exit_code == 2 and "training.lr is 0.1" in " ".join(refused.stderr.split())
    assert file_contents(tmp_path / "both") == before

    branched = command("resume", "both", "--from-round", "1", "--as", "new")
    assert branched.exit_code == 2 and "is a comparison, not a run" in " ".join(branched.stderr.split())
