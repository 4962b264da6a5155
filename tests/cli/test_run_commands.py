"""What `raypfl run` says before it starts."""

from __future__ import annotations

from raypfl.cli.run_commands import shared_options
from raypfl.experiment import experiments


def test_an_option_that_a_command_sets_in_several_methods_is_said_with_their_names():
    compared = {"methods": ["fedavg", "ditto", "fedprox", "pfedme"]}
    changes = ["method.lam=2", "method.mu=1", "training.lr=0.1"]
    (sentence,) = shared_options(experiments(compared, changes), changes)
    assert sentence.startswith("method.lam=2 applies to ditto and pfedme.")
    assert sentence.endswith("'methods=[{name: ditto, lam: ...}, pfedme]'.")
