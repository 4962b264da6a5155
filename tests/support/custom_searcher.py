"""A searcher as a user would write it for Ray Tune."""

from __future__ import annotations

from typing import Any

from ray.tune.search import Searcher


class DoublingSearcher(Searcher):
    """Double the learning rate from trial to trial."""

    def __init__(self, first: float, metric: str | None = None, mode: str | None = None):
        super().__init__(metric=metric, mode=mode)
        self.next = first

    def set_search_properties(self, metric: str, mode: str, config: dict[str, Any], **spec: Any) -> bool:
        return True

    def suggest(self, trial_id: str) -> dict[str, Any]:
        config = {"training.lr": self.next}
        self.next *= 2
        return config

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        pass

    def save(self, checkpoint_path: str) -> None:
        pass

    def restore(self, checkpoint_path: str) -> None:
        pass
