"""Differential privacy: settings, mechanisms, accounting, and masks that cancel."""

from raypfl.privacy.masks import Masks, unmasked
from raypfl.privacy.mechanisms import NoisySum, clipped_updates, server_noise
from raypfl.privacy.settings import PrivacySettings
from raypfl.privacy.spending import SPENDING, Branch, Spending

__all__ = [
    "SPENDING",
    "Branch",
    "Masks",
    "NoisySum",
    "PrivacySettings",
    "Spending",
    "clipped_updates",
    "server_noise",
    "unmasked",
]
