"""Checkpoints that survive a kill: safetensors, Parquet and JSON in a folder, complete only once its manifest is there.

A checkpoint is a folder ``<location>/<number>-round-<round>`` with ::

    server.safetensors                  the tensors of the server's state
    states-00000.safetensors, ...       the clients' states, as many shards of clients as fit in a file
    meta.json                           everything else
    manifest.json                       size and SHA-256 of every other file, written last

Numbers count up with every save, so no checkpoint overwrites another, even of the same round. The tables are in
``<location>/tables``, in files that several checkpoints share (:mod:`raypfl.storage.tables`); manifests list those too.

States that have not changed are not written again: a file of the checkpoint before of which most bytes still count
becomes one of the new checkpoint too (a hard link, or a copy made by the object store). If several files have a name of
a client, the one of the greatest number counts (:class:`raypfl.storage.states.StateShard`).
"""

from raypfl.storage.checkpoints.listing import copy_round, delete_all, has_file, last_round, rounds
from raypfl.storage.checkpoints.reading import load, newest, read_table, server_states
from raypfl.storage.checkpoints.snapshot import Snapshot
from raypfl.storage.checkpoints.writing import save

__all__ = [
    "Snapshot",
    "copy_round",
    "delete_all",
    "has_file",
    "last_round",
    "load",
    "newest",
    "read_table",
    "rounds",
    "save",
    "server_states",
]
