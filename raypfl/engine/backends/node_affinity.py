"""Options for work that must be on a certain node; imports nothing slow, since every process of a run needs it."""

from __future__ import annotations

from typing import Any


def on_node(ray: Any, node: str) -> dict[str, Any]:
    """Return options for an actor or a task that must be on a node, given by its id."""
    # Not `soft`: Ray would put an actor that reserves nothing on any node.
    return {"scheduling_strategy": ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)}
