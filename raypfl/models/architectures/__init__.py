"""The networks that raypfl has itself, beside the dense layers in :mod:`raypfl.models.networks`."""

from raypfl.models.architectures import convolutional, residual, sequences, transformer  # registers them

__all__ = ["convolutional", "residual", "sequences", "transformer"]
