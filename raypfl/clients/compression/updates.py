"""The updates of a group's clients, as the server reads them from compressed messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raypfl.clients.compression.compressors import Compressor
from raypfl.clients.group import ClientGroup
from raypfl.common import rng
from raypfl.common.messages import Each, Mean, numbers_charged, unmarked
from raypfl.common.transfer import to_device
from raypfl.common.user_code import refuse_result


def compressed(
    compressor: Compressor, client_group: ClientGroup, messages: Mapping[str, Any], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a group's messages with rows as the server reads them, and the bytes that each client sends.

    Only updates are compressed: the differences between the rows of a mean or of `Each` and the `arguments` of the same
    names. Other messages stay as they are, and so does a row that is not sent whole or would not become shorter.
    """
    messages_read = dict(messages)
    for name, value in messages.items():
        if _is_update(value, arguments.get(name), len(client_group)):
            messages_read[name] = _with_compressed_rows(compressor, client_group, name, value, arguments[name])
    return messages_read


def _is_update(value: Any, before: Any, num_clients: int) -> bool:
    if not isinstance(value, Mean | Each) or not isinstance(before, Tensor):
        return False
    rows = value.rows
    if rows.shape[:1] != (num_clients,):  # refused later, as without compression
        return False
    return rows.is_floating_point() and rows.numel() > 0 and before.shape in (rows.shape, rows.shape[1:])


def _with_compressed_rows(
    compressor: Compressor, client_group: ClientGroup, name: str, value: Mean | Each, before: Tensor
) -> Mean | Each:
    """Return a message with the rows that the server makes of compressed updates of `before`."""
    rows = unmarked(value.rows).detach()
    rows_before = unmarked(before).expand_as(rows)
    updates = (rows - rows_before).flatten(1)
    size = updates.shape[1]
    num_bytes = numbers_charged(name, value.charged, len(rows), size) * rows.element_size()

    errors = torch.zeros_like(updates)
    name_of_errors = f"compression error of {name} in {client_group.exchange[0]}"
    if compressor.error_feedback:
        errors = unmarked(client_group.state.get(name_of_errors, default=errors[0])).expand_as(updates)
        updates = updates + errors

    decoded = np.zeros(updates.shape, np.float32)
    is_compressed = np.zeros(len(rows), dtype=bool)
    keys = client_group.keys(f"compression {client_group.exchange[1]} {name}")
    for k, update in enumerate(updates.float().cpu().numpy()):
        if num_bytes[k] < size * rows.element_size():
            continue
        message = _encoded(compressor, update, rng.generator_of(int(keys[k])))
        if len(message) < num_bytes[k]:
            decoded[k] = _decoded(compressor, message, size)
            num_bytes[k] = len(message)
            is_compressed[k] = True

    read = to_device(decoded, rows.device).to(rows.dtype)
    chosen = torch.from_numpy(is_compressed).to(rows.device)[:, None]
    if compressor.error_feedback:
        client_group.state[name_of_errors] = torch.where(chosen, updates - read, errors)
    arrived = torch.where(chosen, rows_before.flatten(1) + read, rows.flatten(1)).view_as(rows)
    return replace(value, rows=arrived, num_bytes=torch.from_numpy(num_bytes))


def _encoded(compressor: Compressor, update: np.ndarray, generator: np.random.Generator) -> bytes:
    message = compressor.encode(update, generator)
    if not isinstance(message, bytes):
        refuse_result(compressor.encode, message, "bytes")
    return message


def _decoded(compressor: Compressor, message: bytes, size: int) -> np.ndarray:
    update = compressor.decode(message, size)
    if not isinstance(update, np.ndarray) or update.shape != (size,):
        refuse_result(compressor.decode, update, f"an array of [{size}] numbers")
    return update
