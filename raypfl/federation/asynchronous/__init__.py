"""Asynchronous and buffered rounds: the schedule comes first, then clients train as it says."""
