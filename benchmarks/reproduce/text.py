"""Load text that every machine has, sources of Python, and make a small transformer that reads its bytes."""

from __future__ import annotations

import sysconfig
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

__all__ = ["Gpt", "Text", "drawn", "sources"]

BYTES = 256
_HELD_OUT = 10  # of so many files, one is not learned from


class Text(NamedTuple):
    """Holds the bytes to learn from and those that are held out, both uint8, and what they are."""

    train: np.ndarray
    test: np.ndarray
    source: str


def sources() -> Text:
    """Read the modules of the standard library; those in folders are left out. The same on all ranks of a machine."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = [file.read_bytes() for file in sorted(folder.glob("*.py"))]
    test = b"".join(files[::_HELD_OUT])
    train = b"".join(file for i, file in enumerate(files) if i % _HELD_OUT)
    whole = b"".join(files)
    version = sysconfig.get_python_version()
    source = f"{len(whole) / 1e6:.1f} MB of Python {version}'s standard library, CRC-32 {zlib.crc32(whole):08x}"
    return Text(np.frombuffer(train, np.uint8), np.frombuffer(test, np.uint8), source)


def drawn(text: np.ndarray, sequences: int, context: int, key: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw stretches of text; returns bytes and the bytes that follow each, int64, shape=(sequences, context).

    Args:
        text: uint8.
        sequences: number of stretches.
        context: bytes in each.
        key: what the draw follows from, such as seed, rank, step.
    """
    starts = np.random.default_rng(key).integers(0, text.size - context, sequences)
    rows = torch.from_numpy(text[starts[:, None] + np.arange(context + 1)].astype(np.int64))
    return rows[:, :-1], rows[:, 1:]


class Gpt(nn.Module):
    """Predicts the next byte: a transformer with learned positions, normalization before each block, and no dropout.

    Args:
        width: of the residual stream.
        layers: number of blocks.
        heads: of each attention.
        context: the most bytes that it reads.
    """

    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(BYTES, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context), persistent=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.bytes(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h, src_mask=self.mask, is_causal=True)
        return self.head(self.norm(h))
