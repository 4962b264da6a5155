"""The names under which an experiment asks for networks."""

from __future__ import annotations

from raypfl.registry import Registry

MODELS = Registry("model")
"""Each entry is called as ``entry(input_shape=(C, H, W), num_classes=n, **options)`` and returns an ``nn.Module``."""
