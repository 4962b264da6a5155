"""What `raypfl list KIND NAME` takes from docstrings."""

from __future__ import annotations

from raypfl.cli.actions import listing
from raypfl.data.datasets import DATASETS
from raypfl.experiment.components import _REGISTRIES, GIVEN_BY_ENGINE, options_of
from raypfl.experiment.docstrings import described_options, prose
from raypfl.models import MODELS


def test_every_option_of_every_component_is_described():
    lacking = set()
    for registry in [*_REGISTRIES.values(), MODELS, DATASETS]:
        for name in registry:
            # An entry such as timm:NAME stands for many.
            if ":" in name:
                continue
            entry = registry.get(name)
            described = described_options(entry)
            options = options_of(entry, ("config", *GIVEN_BY_ENGINE))
            lacking |= {(name, option) for option in options if not described.get(option)}
    assert not lacking


def test_the_name_of_a_member_of_a_family_is_not_listed_as_an_option():
    listed = {}
    for registry in [*_REGISTRIES.values(), MODELS, DATASETS]:
        listed |= {name: listing._options(registry, name) for name in registry if name.endswith(":NAME")}
    assert listed.keys() >= {"hf:NAME", "timm:NAME"} and not any(listed.values())


def test_prose_has_a_line_for_each_paragraph_and_leaves_lists_as_they_are():
    def entry() -> None:
        """One ``line``
        and its end.

        A list:
        - first
        - second

        Parameters
        ----------
        nothing : that is shown.
        """

    assert prose(entry) == "One `line` and its end.\n\nA list:\n- first\n- second"
