"""Whatever settings are given: an experiment, or a sentence that says what is wrong."""

from __future__ import annotations

import random

import pytest

from raypfl.common.errors import ConfigError
from raypfl.data import PARTITIONS
from raypfl.experiment import Experiment, experiments
from raypfl.experiment.reference import SETTINGS
from raypfl.learning.objectives import METRICS, OBJECTIVES
from raypfl.learning.optimizers import OPTIMIZERS
from raypfl.methods import METHODS
from raypfl.models import MODELS

NAMES = [*METHODS, *MODELS, *PARTITIONS, *OBJECTIVES, *METRICS, *OPTIMIZERS]
KEYS = [
    *SETTINGS,
    *("data", "model", "cohort", "training", "evaluation", "engine", "ray", "checkpoint", "tracking", "failures"),
    *4 * ("data.name", "model.name", "partition.name", "objective", "method"),
    *("method.lam", "method.server_lr", "method.name", "partition.alpha", "partition.clients", "model.hidden"),
    *("training.optimizer.name", "training.optimizer.beta1", "devices.availability.low", "data.pools.auxiliary"),
    *("methods", "seeds", "nonsense", "training.nonsense", "rounds.x", "a.b.c"),
]
# Numbers, words, lists, mappings, tagged scalars, broken YAML and control characters.
ODD = [
    *(
        "0",
        "-1",
        "1",
        "2.5",
        "1e-3",
        "1e400",
        ".nan",
        ".inf",
        "-.inf",
        "1e9",
        "99999999999999999999999",
        "0x1F",
        "0b12",
    ),
    *(
        "true",
        "null",
        "~",
        "",
        "''",
        "text",
        "a/b",
        "ü",
        "'\\0'",
        "x" * 5000,
        "math:pi",
        "torch.nn:Module",
        "os:system",
    ),
    *("builtins:print", "nowhere:Thing", ":", "a:", ":b", "json:JSONDecoder", "/", "..", "s3://", "~/x"),
    *(
        "[]",
        "[1]",
        "[[]]",
        "[1e9]",
        "[-1]",
        "[local]",
        "[local, local]",
        "[ood/x]",
        "[ood/corrupt/fog/9]",
        "[{}]",
        "[a, {}]",
    ),
    *(
        "{}",
        "{name: 3}",
        "{name: ditto}",
        "{name: [a]}",
        "{a: 1}",
        "{1: 2}",
        "{null: 1}",
        "{low: 0.5, high: x}",
        "{a: {b: {c: 1}}}",
    ),
    *(
        "2001-99-99",
        "2001-01-01",
        "12:30:45",
        "!!binary x",
        "!!int x",
        "!!float x",
        "!!timestamp x",
        "!!python/name:os.system",
    ),
    *(
        "!!bool x",
        "!!set {a}",
        "!!omap [a]",
        "!!pairs [a]",
        "&a [*a]",
        "*a",
        "? a",
        "- a",
        "|",
        ">",
        "%",
        "@",
        "`",
        "0o9",
        "1_0",
        "=",
        "<<",
    ),
    *(
        "{<<: 1}",
        "[" * 3000,
        "{[1]: 2}",
        "{{}: 1}",
        "a: b: c",
        "\\x00",
        "\x00",
        "\ud800",
        "\t",
        "1:2",
        "190:20:30.15",
        "0:99",
        "+.e1",
        "._",
        "_",
    ),
]


def check_random_settings(count: int, seed: int) -> None:
    """Hold random assignments to the claim: accepted, or refused with a message."""
    draws = random.Random(seed)

    def assignment() -> str:
        return f"{draws.choice(KEYS)}={draws.choice(draws.choice([ODD, ODD, NAMES]))}"

    for _ in range(count):
        assignments = [assignment() for _ in range(draws.randint(1, 3))]
        try:
            for experiment in experiments({}, assignments):
                text = experiment.to_yaml()
                # No experiment with a nan is equal to itself.
                assert Experiment.from_yaml(text) == experiment or "nan" in text, assignments
        except ConfigError as error:
            assert str(error).strip(), assignments
        except Exception as error:
            pytest.fail(f"{assignments} raises {type(error).__name__}: {error}")


def test_settings_are_accepted_or_refused_in_a_sentence():
    check_random_settings(150, seed=0)


@pytest.mark.slow
def test_thousands_of_settings_are_accepted_or_refused_in_a_sentence():
    check_random_settings(6000, seed=1)
