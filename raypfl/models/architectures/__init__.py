"""The networks that raypfl implements, besides the dense layers in :mod:`raypfl.models.networks`."""

# Importing them registers them.
from raypfl.models.architectures import convolutional, heterogeneous, residual, sequences, texts, transformer

__all__ = ["convolutional", "heterogeneous", "residual", "sequences", "texts", "transformer"]
