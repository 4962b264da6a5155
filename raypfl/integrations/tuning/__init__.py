"""Hyperparameter search: sweeps over any setting, by Ray Tune."""
