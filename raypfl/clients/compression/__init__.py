"""Compression of the updates that clients send."""

from raypfl.clients.compression.compressors import COMPRESSORS, Compressor

__all__ = ["COMPRESSORS", "Compressor"]
