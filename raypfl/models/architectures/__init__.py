"""The networks that raypfl has itself, beside the dense layers in :mod:`raypfl.models.networks`."""

from raypfl.models.architectures import convolutional, heterogeneous, residual, sequences, transformer  # registers them

__all__ = ["convolutional", "heterogeneous", "residual", "sequences", "transformer"]
