"""Ports of this machine."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A port of the loopback address at which nobody listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return unused.getsockname()[1]
