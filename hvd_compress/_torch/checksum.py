"""Tells whether ranks hold the same values, without sending them."""

from __future__ import annotations

import zlib

import torch

__all__ = ["checksum"]


def checksum(p: torch.Tensor) -> int:
    """Of the bits of a tensor."""
    values = p.detach().cpu().contiguous()
    if 0 in values.stride():
        # one element that stands for one: contiguous to torch, which refuses to see its bytes
        values = values.clone(memory_format=torch.contiguous_format)
    return zlib.crc32(values.reshape(-1).view(torch.uint8).numpy().data) if values.numel() else 0
