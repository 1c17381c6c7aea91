"""The checksum of a bucket that a GPU computes while it moves the bytes, and its reference on the CPU.

The bytes of each move, in packed order (rows by columns, row-major, in the destination's dtype), are padded with zeros
to whole 8-byte little-endian words; the words of a bucket's moves are numbered through, k = 0, 1, ...  Then

    checksum = sum over k of mix(word[k] XOR key(k))  mod 2**64
    key(k)   = (k + 1) * GOLDEN + mix(bucket + 1)     mod 2**64

with GOLDEN and ``mix`` of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014). The
terms may be added in any order, so every thread sums what it moves.

Strength: ``mix`` is a bijection, so a change inside one word is always seen. Changes in several words, words that are
missing, swapped or taken from elsewhere are missed with a chance of about 2**-64 each, for data that was not chosen
against these public keys: it finds faults, not forgers. Words in which two moves meet do not exist, so a bucket sums to
the same value whichever side's strides the moves are read through.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from refitd.layout.codec import Ints
from refitd.layout.dtypes import ITEMSIZE
from refitd.plan.execute import Bytes
from refitd.plan.program import Bucket, Program

GOLDEN = 0x9E3779B97F4A7C15
MIX_1, MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
WORD = 8
_MASK = (1 << 64) - 1
_BLOCK = 1 << 16  # words; the temporaries of a block stay in the cache

Words = NDArray[np.uint64]


def mix(words: Words) -> Words:
    """SplitMix64's output function, element by element; a bijection of 64 bits."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(MIX_1)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(MIX_2)
    return words ^ (words >> np.uint64(31))


def seed(bucket: int) -> int:
    """What the keys of a bucket start from."""
    return int(mix(np.array([bucket + 1], np.uint64))[0])


def sum_words(words: Words, first: int, bucket: int) -> int:
    """The sum over ``words``, of which the first has number ``first`` in its bucket."""
    start = np.uint64(seed(bucket))
    total = 0
    for at in range(0, len(words), _BLOCK):
        block = words[at : at + _BLOCK]
        numbers = np.arange(first + at + 1, first + at + 1 + len(block), dtype=np.uint64)
        total += int(mix(block ^ (numbers * np.uint64(GOLDEN) + start)).sum(dtype=np.uint64))
    return total & _MASK


def move_bytes(program: Program, bucket: Bucket) -> Ints:
    """Payload bytes of each move of a bucket, in the destination's dtype."""
    shapes = program.moves_of(bucket)[:, 8:]
    return np.asarray(shapes[:, 0] * shapes[:, 1] * ITEMSIZE[program.dtypes_of(bucket)[1]], np.int64)


def first_words(sizes: Ints) -> Ints:
    """Number of the first word of each of a bucket's moves, which are ``sizes`` bytes long."""
    words = -(-sizes // WORD)
    return np.asarray(np.cumsum(words) - words, np.int64)


def bucket_checksum(program: Program, bucket: Bucket, packed: Bytes) -> int:
    """The checksum of a bucket from its packed bytes (uint8, at least ``nbytes``, as `refitd.plan.execute.pack` makes).

    One pass where all moves are whole words; else the bytes are first copied apart.
    """
    sizes = move_bytes(program, bucket)
    payload: NDArray[Any] = packed[: bucket.nbytes]
    if (sizes % WORD).any():
        starts = np.cumsum(sizes) - sizes
        shifts = np.repeat(first_words(sizes) * WORD - starts, sizes)
        padded = np.zeros(int((-(-sizes // WORD)).sum()) * WORD, np.uint8)
        padded[np.arange(bucket.nbytes) + shifts] = payload
        payload = padded
    return sum_words(np.frombuffer(payload, "<u8"), 0, bucket.id)
