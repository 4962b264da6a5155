"""Checkpoints that survive a kill: safetensors, Parquet and JSON in a folder, complete only once its manifest is there.

A checkpoint is a folder ``<location>/<number>-round-<round>`` with ::

    server.safetensors      the tensors of the server's state
    meta.json               everything else
    manifest.json           size and SHA-256 of every file, written last

Numbers count up with every save, so no checkpoint overwrites another, even of the same round. The clients' states are
in ``<location>/states`` (:mod:`.state_files`) and the tables in ``<location>/tables`` (:mod:`raypfl.storage.tables`).
Their files never change, so checkpoints share them: each manifest lists those that it needs, and a file that none lists
is deleted.

So states that have not changed are not written again: a file of which most bytes still count stays in use. If several
files have a name of a client, the one of the greatest number counts (:class:`raypfl.storage.states.StateShard`).
"""

from raypfl.storage.checkpoints.layout import Damaged, explain_write_errors
from raypfl.storage.checkpoints.listing import copy_round, delete_all, last_round, rounds
from raypfl.storage.checkpoints.reading import load, newest, read_table, server_states
from raypfl.storage.checkpoints.snapshot import Snapshot
from raypfl.storage.checkpoints.state_files import (
    StoredStates,
    has_file,
    read_file,
    save_states,
    write_file,
    write_shards,
)
from raypfl.storage.checkpoints.writing import save

__all__ = [
    "Damaged",
    "Snapshot",
    "StoredStates",
    "copy_round",
    "delete_all",
    "explain_write_errors",
    "has_file",
    "last_round",
    "load",
    "newest",
    "read_file",
    "read_table",
    "rounds",
    "save",
    "save_states",
    "server_states",
    "write_file",
    "write_shards",
]
