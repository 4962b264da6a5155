"""The search in a study's file: which settings, from which spaces, and what decides."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any, Literal

from pydantic import Field

from raypfl.common.errors import ConfigError, did_you_mean
from raypfl.experiment.checks.validation import FilePart
from raypfl.experiment.comparison import PER_METHOD
from raypfl.experiment.spaces import Space, spaces_of
from raypfl.studies.parts import MetricColumn


class Search(FilePart):
    """A search of settings for each row, with equally many trials for every method.

    Attributes
    ----------
    trials : number of configurations that are drawn for each method in each setting.
    shared : setting -> its space, for all methods (:func:`raypfl.experiment.spaces.spaces_of`).
    methods : label -> further settings of this method and their spaces.
    seed : seed of the draws.
    seeds : number of runs of a trial, from the study's first seed on; their mean decides.
    model, value, choose : model, aggregate and round of the rows on validation data that decide, as in `MetricColumn`.
    """

    trials: int = Field(default=10, ge=1)
    shared: dict[str, Any] = Field(min_length=1)
    methods: dict[str, dict[str, Any]] = Field(default_factory=dict)
    seed: int = 0
    seeds: int = Field(default=1, ge=1)
    model: Literal["personal", "global", "deployed"] = "deployed"
    value: str | None = None
    choose: Literal["last", "validation"] = "last"

    @property
    def metric(self) -> MetricColumn:
        """What decides which trial is the best."""
        return MetricColumn(protocol="val", model=self.model, value=self.value, choose=self.choose, last=1)

    @property
    def keys(self) -> set[str]:
        """The settings that are searched in some method."""
        return {*self.shared, *(key for settings in self.methods.values() for key in settings)}

    def spaces(self, method: str) -> list[Space]:
        """Return the spaces of a method, by its label.

        Raises
        ------
        ConfigError : if one of them is not valid.
        """
        return spaces_of(self.shared | self.methods.get(method, {}))


def search_mistakes(search: Search, methods: Collection[str]) -> Iterator[str]:
    """Yield a sentence for each mistake in the search of a study with these labels of methods."""
    for label, settings in search.methods.items():
        if label not in methods:
            yield f"search.methods.{label} is not one of the study's methods; {did_you_mean(label, methods)}"
        for key in settings.keys() & search.shared.keys():
            yield f"search.methods.{label} has {key}, which search.shared has for all methods; leave one of them out."

    for key in sorted(search.keys):
        section = key.partition(".")[0]
        if section not in ("method", *PER_METHOD) or key == "method":
            yield (
                f"search has {key}, which all methods of a study share; search options of methods (method.lam), or "
                f"settings of {', '.join(PER_METHOD)}."
            )
    for label in methods:
        # `raypfl study new` names rows by their options, such as "ditto lam=1.0".
        for key in sorted(search.shared.keys() | search.methods.get(label, {}).keys()):
            if re.search(rf"\b{re.escape(key.rpartition('.')[2])}=", label):
                yield f"The row {label!r} names a value of {key}, which the search chooses; give the row another label."
        try:
            grids = [space.key for space in search.spaces(label) if space.kind == "grid"]
        except ConfigError as error:
            yield str(error)
            return
        if grids:
            yield f"search.{grids[0]} is a grid, but a study draws its trials; write choice instead."
            return
