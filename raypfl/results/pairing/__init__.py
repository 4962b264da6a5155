"""Differences between methods, paired by seed and client."""
