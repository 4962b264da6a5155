"""The server of a run: the round loop, evaluation, setup."""
