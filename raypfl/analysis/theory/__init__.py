"""Bounds and rates that papers prove, as functions of their quantities."""
