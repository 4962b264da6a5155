"""A lock on global state of PyTorch and Python, for programs that call raypfl from several threads."""

import threading

exclusive = threading.RLock()
"""Held while code seeds torch's global random streams or relies on them, or puts tensors into a shared network.

There is one lock for both: with one for each, two threads that took them in different orders would wait for each other.
"""
