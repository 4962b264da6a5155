"""Differential privacy: settings, mechanisms, accounting, and masks that cancel."""

from raypfl.learning.privacy.masks import Masks, unmasked
from raypfl.learning.privacy.mechanisms import NoisySum, clipped_updates, server_noise
from raypfl.learning.privacy.settings import PrivacySettings
from raypfl.learning.privacy.spending import SPENDING, PrivateTraining, Spending

__all__ = [
    "SPENDING",
    "Masks",
    "NoisySum",
    "PrivacySettings",
    "PrivateTraining",
    "Spending",
    "clipped_updates",
    "server_noise",
    "unmasked",
]
