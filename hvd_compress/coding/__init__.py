"""Code integers without loss: Golomb-Rice for gaps between indices, Elias for the levels of QSGD.

Functions of arrays, without headers: a coded section is an array of uint64 that reaches to the end of its payload's
body. Encoders return None where the code would not be shorter than the plain section; decoders take no number of a
stream on trust.
"""

from __future__ import annotations

from hvd_compress.coding import elias, golomb

__all__ = ["elias", "golomb"]
