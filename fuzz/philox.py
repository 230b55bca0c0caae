"""Random words by counter: word i of a stream depends on the stream's key and i alone.

Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): block b of a stream is the four
words that the counter b gives under the key. numpy's raw stream computes it; ``tests/fuzz/test_philox.py`` holds it to
the published vectors and to a plain Python version, so a stream never changes with the library.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
_COUNTERS = 2**256


@lru_cache(4096)
def key_of(text: str, name: str) -> bytes:
    """The 16-byte key of a tensor's stream: the head of SHA-256 over the case's text, a newline and the name."""
    return hashlib.sha256(f"{text}\n{name}".encode()).digest()[:16]


def words(key: bytes, start: int, count: int) -> Words:
    """Words ``start .. start + count`` of a stream, uint64 ``[count]``.

    Raises ValueError for a key that is not 16 bytes long, or a negative start or count.
    """
    if len(key) != 16:
        raise ValueError(f"key has {len(key)} bytes, expected 16")
    if start < 0 or count < 0:
        raise ValueError(f"words {start}..{start}+{count}: both must be >= 0")
    first, skipped = divmod(start, 4)
    # numpy counts up before it generates, so block b comes after the counter b - 1.
    generator = np.random.Philox(key=np.frombuffer(key, "<u8").astype(np.uint64), counter=(first - 1) % _COUNTERS)
    raw: Words = generator.random_raw(skipped + count).astype(np.uint64, copy=False)
    return raw[skipped:]


def word(key: bytes, index: int = 0) -> int:
    """One word, as an integer."""
    return int(words(key, index, 1)[0])
