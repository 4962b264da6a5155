"""What each command does. All need torch, and nearly all of raypfl; the command line itself imports neither."""

from raypfl.engine.backends.processes import importing

with importing():
    import raypfl.runs.driver  # noqa: F401
