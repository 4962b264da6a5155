"""Runs: start, resume and stop them, and read what they left behind."""
