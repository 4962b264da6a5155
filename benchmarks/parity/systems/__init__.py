"""The systems that are compared, each run in its own environment."""
