"""Checks of a description: types, ranges, contradictions, and settings without effect."""
