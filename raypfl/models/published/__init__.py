"""Networks and weights of other libraries."""

from raypfl.models.published import networks, transformers  # registers them

__all__ = ["networks", "transformers"]
