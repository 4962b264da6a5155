"""Networks and weights of other libraries."""

from raypfl.models.published import networks  # registers them

__all__ = ["networks"]
