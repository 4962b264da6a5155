"""Networks as functions of a flat vector."""

from raypfl.models import architectures, published  # registers them
from raypfl.models.flat import FlatModel
from raypfl.models.layout import Segment
from raypfl.models.networks import MODELS
from raypfl.models.predictor import Predictor

__all__ = ["MODELS", "FlatModel", "Predictor", "Segment", "architectures", "published"]
