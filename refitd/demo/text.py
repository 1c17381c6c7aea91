"""The demo's sentences as token ids: WordPiece over ``vocab.txt`` where it lies beside the weights, else by length."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

PAD, UNKNOWN, START, END, MASK = 0, 100, 101, 102, 103
_SPECIAL = 104

SENTENCES = (
    "The newest weights reach every engine, shard to shard.",
    "A node dies in the middle of a transfer and the refit still ends well.",
    "Whoever generates must never serve a mix of two publications.",
    "Each byte crosses the slow link once.",
)


def encode(sentences: Sequence[str], vocabulary: Mapping[str, int] | None, size: int) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, each int64 [sentences, longest sentence]; ids are below ``size`` (at least 105)."""
    rows = [[START, *_tokens(s, vocabulary, size), END] for s in sentences]
    width = max(map(len, rows))
    ids = torch.tensor([row + [PAD] * (width - len(row)) for row in rows])
    return ids, (ids != PAD).long()


def load_vocabulary(weights: Path) -> dict[str, int] | None:
    """The vocabulary that lies beside a file of weights, or None."""
    path = weights.with_name("vocab.txt")
    if not path.exists():
        return None
    return {line: number for number, line in enumerate(path.read_text(encoding="utf-8").splitlines())}


def _tokens(sentence: str, vocabulary: Mapping[str, int] | None, size: int) -> list[int]:
    words = re.findall(r"\w+|[^\w\s]", sentence.lower())
    if vocabulary is None:
        return [_SPECIAL + zlib.crc32(w.encode()) % (size - _SPECIAL) for w in words]
    return [piece for word in words for piece in _wordpiece(word, vocabulary)]


def _wordpiece(word: str, vocabulary: Mapping[str, int]) -> list[int]:
    """Longest pieces first; a word that cannot be composed is one unknown token."""
    pieces, start = [], 0
    while start < len(word):
        prefix = "##" if start else ""
        end = next((e for e in range(len(word), start, -1) if prefix + word[start:e] in vocabulary), None)
        if end is None:
            return [UNKNOWN]
        pieces.append(vocabulary[prefix + word[start:end]])
        start = end
    return pieces
