"""Attacks on the models of finished runs."""
