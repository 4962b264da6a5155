"""The command line, on runs of two rounds without Ray."""

from __future__ import annotations

import inspect
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from raypfl.cli.app import app, main
from raypfl.common.version import __version__
from raypfl.runs import driver, preparing
from tests.support.command import raypfl, raypfl_json
from tests.support.runs import Interrupt

SMALL = [
    *("rounds=2", "partition.clients=4", "training.steps=2", "evaluation.every=1"),
    *("engine.backend=inline", "tracking.mlflow=false"),
]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


def test_without_arguments_the_digits_are_compared_and_all_results_are_shown():
    result = raypfl("run", *SMALL, draws=True)
    assert result.exit_code == 0, result.output
    for part in ("fedavg", "ditto", "worst", "Picture", "weights", "Try next", "raypfl resume runs/digits-2"):
        assert part in result.stdout
    assert "round 2/2" in result.stderr and "round 2/2" not in result.stdout
    (picture,) = Path("runs").glob("digits-*/picture.png")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_without_a_recipe_other_data_name_the_run_and_the_defaults_are_reported():
    small = [word for word in SMALL if "clients" not in word]
    run = raypfl("run", "data=diabetes", "method=fedavg", "partition=by_column", "training.lr=0.001", *small)

    assert run.exit_code == 0, run.output
    # Not what the command sets.
    assert "recipe digits: model mlp. Set them" in run.stderr
    (folder,) = Path("runs").iterdir()
    assert folder.name.startswith("diabetes")
    # Digits are not involved, so that the suggested command does not name them.
    assert "raypfl run data=diabetes" in run.stdout and "name=" not in run.stdout


def test_whoever_runs_a_table_without_a_partition_is_told_of_clients_by_a_column():
    Path("people.csv").write_text("city,age,bought\n" + "".join(f"{'AB'[i % 2]},{i},{i % 3 % 2}\n" for i in range(60)))
    table = ["data=table", "data.root=people.csv", "data.target=bought", "method=fedavg", *SMALL]
    for words, is_told in (([], True), (["partition=iid"], False)):
        run = raypfl("run", *table, *words)
        assert run.exit_code == 0, run.output
        assert ("a column: data.group=COLUMN partition=by_column." in run.stderr) == is_told


def test_methods_and_seeds_are_chosen_on_the_command_line():
    runs = raypfl_json("run", *SMALL, "--method", "local,fedavg", "--seeds", "2")["runs"]
    chosen = [(run["experiment"]["method"]["name"], run["experiment"]["seed"]) for run in runs]
    assert chosen == [("local", 0), ("local", 1), ("fedavg", 0), ("fedavg", 1)]
    assert all(run["status"] == "finished" and run["weights_hash"] for run in runs)


def test_of_two_assignments_of_a_setting_the_last_counts_which_is_said_and_is_suggested():
    result = raypfl("run", *SMALL, "rounds=1", "--method", "fedavg,")
    assert "rounds=1 counts, and not rounds=2, which comes before it.\n" in result.stderr
    assert "round 1/1" in result.stderr
    suggested = [line for line in result.stdout.split("Try next")[1].splitlines() if "raypfl run" in line]
    assert suggested and all("rounds=1 " in line and "rounds=2" not in line for line in suggested)


def test_a_users_file_is_run(elsewhere: Path):
    (elsewhere / "mine.yaml").write_text("method: ditto\n")
    (run,) = raypfl_json("run", "mine.yaml", *SMALL, "method.lam=2")["runs"]
    assert run["experiment"]["name"] == "mine" and Path(run["run_dir"]).name.startswith("mine-ditto-s0-")
    assert run["experiment"]["method"]["lam"] == 2.0
    assert Path(run["run_dir"], "picture.png").exists()


def test_a_name_in_a_file_is_the_runs_name_and_a_copied_description_keeps_its_own(elsewhere: Path):
    (elsewhere / "mine.yaml").write_text("name: ours\n")
    (run,) = raypfl_json("run", "mine.yaml", *SMALL)["runs"]
    (again,) = raypfl_json("run", f"{run['run_dir']}/experiment.yaml")["runs"]
    assert again["experiment"]["name"] == run["experiment"]["name"] == "ours"


def test_a_resumed_run_is_called_by_its_method():
    (run,) = raypfl_json("run", *SMALL, "--method", "ditto")["runs"]
    log = raypfl("resume", run["run_dir"], "rounds=3").stderr
    assert "\nditto: round 3/3, " in log and log.count(Path(run["run_dir"]).name) == 1


@pytest.mark.filterwarnings("default:perada is for a network")
def test_a_warning_is_a_sentence_on_stderr_once_and_no_line_of_code():
    log = raypfl("run", "method=perada", "method.steps=0", *SMALL).stderr
    assert log.count("Warning:") == 1 and "Warning: perada is for a network that is mostly frozen" in log
    assert "perada-digits" in log and ".py" not in log

    log = raypfl("data", "show", "data=tests.data.test_data:dozen", "partition={name: iid, clients: 12}").stderr
    assert log.startswith("Warning: No client of") and ".py" not in log


@pytest.mark.parametrize("words", [("run", "--seeds", "0"), ("study", "--seeds", "0"), ("study", "--rounds", "0")])
def test_zero_seeds_or_rounds_are_refused(words):
    assert raypfl(*words).exit_code == 2 and not Path("runs").exists()


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["--method", "fedprox,ditto", "method.lam=2", "--seeds", "2"], marks=pytest.mark.thorough),
        pytest.param(["my files/mine.yaml", "partition.alpha=0.5"], marks=pytest.mark.thorough),
        ["methods=[{name: ditto, settings: {training.lr: 0.05}}, local]"],
    ],
)
def test_every_suggested_command_runs_and_keeps_methods_and_seeds(elsewhere: Path, words):
    (elsewhere / "my files").mkdir()
    (elsewhere / "my files" / "mine.yaml").write_text("method: {name: fedavg, server_lr: 0.5}\nseeds: 2\n")

    suggested = raypfl("run", *words, *SMALL, "rounds=1").stdout.split("Try next")[1]
    commands = [shlex.split(line) for line in suggested.splitlines() if line.strip()]
    assert commands and all(command[0] == "raypfl" for command in commands)

    for command in commands:
        result = raypfl(*command[1:])
        assert result.exit_code == 0, (command, result.output)
        if "seeds=3" in command and "--method" in words:
            assert result.stdout.count("fedprox, seed") == result.stdout.count("ditto, seed") == 3


def test_methods_and_seeds_set_in_two_ways_are_refused():
    for words, sentence in (
        (["--method", "ditto", "method=local"], "Both --method and method=local are given; keep one of them."),
        (["--seeds", "2", "seeds=3"], "Both --seeds and seeds=3 are given; keep one of them."),
    ):
        refused = raypfl("run", *SMALL, *words)
        assert refused.exit_code == 2 and sentence in refused.stderr


def test_suggested_commands_repeat_the_run_with_one_change():
    suggested = raypfl("run", *SMALL, "data.cache=my cache").stdout.split("Try next")[1]
    assignments = shlex.join([*SMALL, "data.cache=my cache"])
    assert f"raypfl run digits {assignments} partition.alpha=0.1 seeds=3\n" in suggested

    (run,) = Path("runs").glob("*/ditto-s0")
    suggested = raypfl("resume", str(run), "rounds=3").stdout.split("Try next")[1]
    assert f"raypfl run {run}/experiment.yaml seeds=3\n" in suggested
    assert (
        raypfl_json("run", f"{run}/experiment.yaml", "method=ditto")["runs"][0]["experiment"]["data"]["cache"]
        == "my cache"
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["run", "rouns=2"], "rouns is not a setting of an experiment; did you mean 'rounds'?"),
        (["run", "digts"], "There is no recipe called 'digts'; did you mean 'digits'?"),
        (["run", "people/people.csv"], "by data=table data.root=people/people.csv data.target=COLUMN."),
        (
            ["run", "mine.py"],
            "mine.py is not a recipe; name a method of your own by module and class: --method mine:ClassNa",
        ),
        (["run", "ditto"], "There is no recipe called 'ditto', but a method: set method=ditto."),
        (["run", "--method", "dito"], "There is no method called 'dito'; did you mean 'ditto'?"),
        (["run", "digits", "quickly"], "'quickly' is not an assignment"),
        (["run", "training.lr", "0.1"], "'training.lr' is a setting and needs its value, without spaces"),
        (["run", "digits", "training.lr", "=", "0.1"], "without spaces around '=': training.lr=0.1\n"),
        (["run", "rounds=1", "method.lam"], ": method.lam=VALUE\n"),
        (["run", "attack=backdoor", "diabetes", "rounds=2"], "'diabetes' comes first, before the settings that change"),
        (["run", "rounds=2", "cifarr10"], "before the settings that change it, but none is called 'cifarr10'; did"),
        (["study", "rounds=2", "fednh-tabel1"], "none is called 'fednh-tabel1'; did you mean 'fednh-table1'?"),
        (["study", "rounds=2", "fednh-table1"], "that change it: fednh-table1 rounds=2\n"),
        (["run", "mine.yaml"], "There is no file 'mine.yaml'."),
        (["run", "--method", ","], "methods is []; it must be a list, such as"),
        (["run", "--method", "local,fedavg,local"], "methods has local twice, with the same options and settings;"),
        (["run", "methods=[{name: ditto, lam: 1}, ditto]", "method.lam=2"], "methods has ditto twice"),
        (["run", "--rounds", "5"], "There is no option --rounds; write rounds=VALUE."),
        (["tune", "sweep.yaml", "--trials", "3"], "There is no option --trials; write trials=VALUE."),
        (["submit", "tune", "sweep.yaml", "--trials=3"], "There is no option --trials; write trials=VALUE."),
        (["run", "--seed", "3"], "There is no option --seed; write seed=VALUE or --seeds N for several."),
        (["resume", "RUN", "--seed", "3"], "There is no option --seed; write seed=VALUE."),
        (["study", "--lr=0.1"], "There is no option --lr; write training.lr=VALUE."),
        (["resume", "RUN", "--foo"], "There is no option --foo; settings are given as KEY=VALUE, such as rounds=5."),
        (
            ["run", "partition.clients=10", "data.unseen_fraction=0.5", "cohort.size=6"],
            "cohort.size is 6, but digits has 5 clients that are trained (5 are unseen); draw at most that many.",
        ),
        (["run", "method=fedavg,ditto"], "name one, not several. Compare methods by --method A,B."),
        (["run", "--methods", "fedavg,ditto"], "There is no option --methods; write --method A,B."),
        (["run", "--training.lr", "0.1"], "There is no option --training.lr; write training.lr=VALUE."),
        (["list", "settings", "trainning"], "There is no section or setting 'trainning'; did you mean 'training'?"),
        (["list", "settings", "learning_rate"], "setting 'learning_rate'; did you mean 'training.lr'?"),
        (["list", "settings", "traning.lr"], "There is no setting 'traning.lr'; did you mean 'training.lr'?"),
        (["list", "methods", "dito"], "There is no method called 'dito'; did you mean 'ditto'?"),
        (["list", "asynchronous", "dito"], "There is no entry called 'dito'; did you mean 'ditto'?"),
        (["list"], "Name what to list, as in `raypfl list methods`: methods, asynchronous, datasets, models"),
        (["list", "method"], "'method' cannot be listed; did you mean 'methods'?"),
    ],
)
def test_a_mistake_is_a_sentence_on_stderr_and_exit_code_two(words, sentence):
    result = raypfl(*words)
    assert result.exit_code == 2
    assert sentence in result.stderr and "Traceback" not in result.output


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--method", "fedavg,partial", "method.personal=haed"], "method.personal is 'haed'"),
        (
            ["--method", "fedavg,fednh", "data.name=tests.learning.test_multi_label:marked", "data.rare=1"],
            "method is 'fednh', which learns the objective 'classification', but that of",
        ),
    ],
)
def test_settings_that_do_not_fit_a_later_method_are_refused_before_an_earlier_one_runs(words, sentence):
    result = raypfl("run", *SMALL, *words)
    assert result.exit_code == 2 and sentence in result.stderr
    assert "round 1/2" not in result.stderr and not list(Path(".").glob("runs/*"))


@pytest.mark.parametrize("output", ["/dev/null/x", "x" * 300])
def test_a_folder_that_cannot_be_made_is_refused_in_a_sentence(output):
    refused = raypfl("run", *SMALL, f"output={output}")
    assert refused.exit_code == 2 and "cannot be made" in refused.stderr
    refused = raypfl("run", *SMALL, "--run-dir", f"/dev/null/{output}")
    assert refused.exit_code == 1 and "cannot be made: Not a directory" in refused.stderr


def test_resuming_a_folder_without_a_run_is_a_sentence_and_exit_code_two():
    result = raypfl("resume", "nowhere")
    assert result.exit_code == 2
    assert "There is no folder nowhere." in result.stderr

    Path("runs/cc").mkdir(parents=True)
    assert "runs/cc is not the folder of a run" in raypfl("resume", "runs/cc").stderr
    Path("runs/cc/comparison.yaml").touch()
    assert "There is no folder runs/cc2; did you mean 'runs/cc'?" in raypfl("resume", "runs/cc2").stderr


def test_ctrl_c_in_a_run_exits_with_130_and_says_how_to_continue(monkeypatch: pytest.MonkeyPatch):
    resume = driver.resume

    def interrupted(folder, *, listeners, **options):
        return resume(folder, listeners=[*listeners, Interrupt(round=1)], **options)

    monkeypatch.setattr(driver, "resume", interrupted)
    result = raypfl("run", *SMALL, "rounds=50", "--method", "fedavg")

    assert result.exit_code == 130
    assert result.output.count("raypfl resume") == 1
    assert "To continue: raypfl resume runs/digits-fedavg" in result.stderr


GROWING = """
from raypfl.methods import FedAvg

class Growing(FedAvg):
    factor: float = 1e30

    def train(self, clients, theta):
        return super().train(clients, theta * self.factor if clients.round == 3 else theta)
"""


def test_a_run_that_diverged_says_how_it_continues_with_other_settings(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
):
    (elsewhere / "growing.py").write_text(GROWING)
    monkeypatch.syspath_prepend(elsewhere)
    words = ["run", *SMALL, "rounds=4", "--method", "growing:Growing", "checkpoint.every=1"]
    error = raypfl(*words).stderr
    assert "diverged" in error
    (run,) = Path("runs").glob("digits-*")

    again = raypfl("resume", str(run))
    assert again.exit_code == 1 and "The run diverged before, and was not trained again: Training div" in again.stderr
    assert "round 3/4" not in again.stderr and error.split("With other settings:")[1] in again.stderr

    command = error.split("With other settings: raypfl ")[1].split("\n")[0]
    words = command.split()
    assert raypfl(*words, "method.factor=1").exit_code == 0


def test_where_mlflow_refuses_the_end_says_how_to_record_the_run_later():
    result = raypfl("run", *SMALL, "method=local", "tracking.mlflow=true", "tracking.uri=sqlite:////dev/null/mlflow.db")
    (run,) = Path("runs").glob("digits-*")
    assert result.exit_code == 0 and "mlflow ui" not in result.stdout
    assert f"nothing is recorded; to try again: raypfl track {run}\n" in result.stdout


def test_ctrl_c_before_the_first_round_prints_no_traceback(monkeypatch: pytest.MonkeyPatch):
    def interrupted(*data):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(preparing, "prepare", interrupted)
        result = raypfl("run", *SMALL, "--method", "fedavg")
    (run,) = Path("runs").iterdir()
    assert result.exit_code == 130 and f"Stopped. To continue: raypfl resume {run}\n" in result.stderr
    assert raypfl_json("resume", str(run))["runs"][0]["status"] == "finished"


def test_a_method_in_the_current_folder_is_found(elsewhere: Path, monkeypatch: pytest.MonkeyPatch):
    (elsewhere / "nearby_method.py").write_text("from raypfl.methods import Local\n\nclass Mine(Local): ...\n")
    monkeypatch.setattr("sys.argv", ["raypfl", "run", *SMALL, "--method", "nearby_method:Mine", "--quiet"])
    monkeypatch.setattr("sys.path", ["", *sys.path[1:]])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code in (0, None)


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("methods", ["ditto", "lam = 0.75", "and those of fedavg"]),
        ("methods", ["fedrep", "personal_epochs = 10", "and those of partial"]),
        ("models", ["mlp", "hidden = [128]"]),
        ("partitions", ["dirichlet", "alpha = 0.3"]),
        ("datasets", ["digits", "parquet"]),
        ("augmentations", ["crop", "padding = 4", "cutout"]),
        ("objectives", ['reduction = "mean"', "cross-entropy of logits"]),
        ("attacks", ["factor = null"]),
        ("metrics", ["auc", "perplexity"]),
        ("settings", ["training.lr", "cohort.fraction", "Share of the clients drawn"]),
        ("recipes", ["digits", "handwritten digits"]),
        ("studies", ["fednh-table1", "digits-personal"]),
    ],
)
def test_components_are_listed_with_their_options(kind, parts):
    result = raypfl("list", kind)
    assert result.exit_code == 0
    assert all(part in result.stdout for part in parts)


def test_the_settings_of_one_section_are_listed():
    assert "file, required" in raypfl("list", "hardware").stdout
    listed = raypfl("list", "settings", "cohort").stdout
    assert "cohort.fraction" in listed and "training.lr" not in listed


def test_one_component_is_described_with_all_options_and_what_they_mean(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
):
    listed = " ".join(raypfl("list", "methods", "ditto").stdout.split())
    assert "a personal model for each client that stays close to the global one (Li et al. 2021). Client k" in listed
    assert "lam 0.75 Weight of the proximal term, lambda; 0.75 in Dai et al. 2023." in listed
    assert "personal_epochs null Epochs of the personal model in each round; null: as many" in listed
    assert 'weighting "samples" Weights of clients in the average' in listed

    (elsewhere / "undescribed.py").write_text(
        "from raypfl.methods import FedAvg\nclass Mine(FedAvg):\n    a: int = 1\n"
    )
    monkeypatch.syspath_prepend(elsewhere)
    listed = " ".join(raypfl("list", "methods", "undescribed:Mine").stdout.split())
    assert listed.startswith("It has no docstring. option default what it is ─") and " a 1 weighting" in listed

    assert "torchvision" in raypfl("list", "models", "torchvision:resnet18").stdout
    assert "file required" in " ".join(raypfl("list", "hardware", "fedscale").stdout.split())
    assert "methods: [fedavg, ditto]" in raypfl("list", "recipes", "digits").stdout
    for name in ("training.lr", "lr"):
        assert raypfl("list", "settings", name).stdout.count("training.") == 1


def test_the_package_can_be_run_as_a_module_and_offers_completion():
    command = [sys.executable, "-m", "raypfl", "--version"]
    root = Path(__file__).parents[2]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    assert result.stdout.splitlines() == [f"raypfl {__version__}"]
    assert "--install-completion" in raypfl("--help").stdout


def test_help_loses_no_text_and_breaks_no_sentence(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "500")
    for command in app.registered_commands:
        help_text = raypfl(*(command.name or command.callback.__name__).split(), "--help").stdout
        for paragraph in inspect.getdoc(command.callback).replace("\\[", "[").split("\n\n"):
            assert paragraph.replace("\n", " ") in help_text
    assert "methods=[fedavg,ditto] names the methods" in raypfl("study", "new", "--help").stdout


def test_help_shows_commands_by_what_they_are_for_and_no_name_is_broken():
    help_text = raypfl("--help").stdout
    for panel, command in [
        ("Experiments", "run"),
        ("Before an experiment", "list"),
        ("Jobs on a Ray cluster", "submit"),
    ]:
        assert f"│ {command} " in help_text.partition(f"─ {panel} ─")[2].partition("╰─")[0]
    assert "partitions, " in raypfl("list", "--help").stdout
