"""The demo's model: weights from files and seeds, tokens, training that repeats itself."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch

from refitd.demo import text, weights
from refitd.demo.model import Training, embed
from refitd.errors import InputError

TINY = weights.Spec(vocab=120, positions=32, hidden=8, intermediate=16, layers=1, heads=2)


def write_safetensors(path: Path, tensors: weights.Weights) -> None:
    names = {torch.float32: "F32", torch.int64: "I64", torch.bfloat16: "BF16"}
    header, body = {"__metadata__": {"format": "pt"}}, b""
    for name, tensor in tensors.items():
        data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        shape = list(tensor.shape)
        header[name] = {
            "dtype": names[tensor.dtype],
            "shape": shape,
            "data_offsets": [len(body), len(body) + len(data)],
        }
        body += data
    text_header = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text_header)) + text_header + body)


def test_a_file_gives_back_the_weights_that_were_written(tmp_path: Path) -> None:
    """A safetensors file of an encoder is read to the bit, and its sizes are found from the shapes."""
    made = weights.make(TINY, seed=3)
    write_safetensors(tmp_path / "model.safetensors", made)
    (tmp_path / "config.json").write_text('{"num_attention_heads": 2}')
    spec, read = weights.load(tmp_path / "model.safetensors")
    assert spec == TINY
    assert list(read) == list(made)
    assert all(torch.equal(read[name], made[name]) for name in made)


def test_half_precision_files_become_float32_masters(tmp_path: Path) -> None:
    """A file in bfloat16 is trained in float32."""
    made = {name: w.bfloat16() if w.is_floating_point() else w for name, w in weights.make(weights.SMALL).items()}
    write_safetensors(tmp_path / "m.safetensors", made)
    _spec, read = weights.load(tmp_path / "m.safetensors")
    name = "pooler.dense.weight"
    assert read[name].dtype == torch.float32
    assert torch.equal(read[name], made[name].float())


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    """A file that lacks a tensor is refused with the tensor's name."""
    made = weights.make(TINY)
    del made["encoder.layer.0.output.dense.bias"]
    write_safetensors(tmp_path / "m.safetensors", made)
    (tmp_path / "config.json").write_text('{"num_attention_heads": 2}')
    with pytest.raises(
        InputError, match=r"encoder.layer.0.output.dense.bias: expected shape \(8,\), got no such tensor"
    ):
        weights.load(tmp_path / "m.safetensors")


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff" * 8, struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 4) + b"oops"],
    ids=["empty", "huge header", "not an object", "not JSON"],
)
def test_garbage_is_refused(tmp_path: Path, data: bytes) -> None:
    """A file that is no safetensors file raises InputError with its path."""
    path = tmp_path / "garbage"
    path.write_bytes(data)
    with pytest.raises(InputError, match="garbage: expected a safetensors file"):
        weights.read_safetensors(path)


def test_words_become_pieces_of_the_vocabulary() -> None:
    """WordPiece takes the longest piece first; what cannot be composed is one unknown token."""
    vocabulary = {"[PAD]": 0, "ref": 5, "refit": 7, "##s": 8, "##it": 6, ".": 9}
    ids, mask = text.encode(["Refits.", "xyz"], vocabulary, size=200)
    assert ids.tolist() == [[text.START, 7, 8, 9, text.END], [text.START, text.UNKNOWN, text.END, text.PAD, text.PAD]]
    assert mask.tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]


def test_without_a_vocabulary_ids_stay_in_range() -> None:
    """Hashed ids lie between the special tokens and the vocabulary's end."""
    ids, _mask = text.encode(text.SENTENCES, None, size=120)
    assert int(ids.max()) < 120
    assert int(ids[:, 1].min()) >= 104


def test_two_trainings_are_equal_at_every_step() -> None:
    """Training from the same start repeats itself to the bit, also when replayed in one go, and does learn."""
    start = weights.make(TINY)
    ids, mask = text.encode(text.SENTENCES, None, TINY.vocab)
    first, second = (Training({n: w.clone() for n, w in start.items()}, TINY, ids) for _ in range(2))
    losses = [first.advance(step) for step in (1, 2, 3)]
    second.advance(3)
    assert losses[2] < losses[0]
    assert all(torch.equal(first.weights[n], second.weights[n]) for n in start)
    moved = [n for n in start if not torch.equal(first.weights[n], start[n])]
    assert set(start) - set(moved) == {"embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias"}
    assert torch.equal(embed(first.weights, TINY, ids, mask), embed(second.weights, TINY, ids, mask))


def test_padding_does_not_change_an_embedding() -> None:
    """A sentence alone and in a batch with a longer one has the same embedding (to rounding), of length one."""
    made = weights.make(TINY)
    alone = embed(made, TINY, *text.encode(["one two"], None, TINY.vocab))
    batch = embed(made, TINY, *text.encode(["one two", "one two three four five"], None, TINY.vocab))
    torch.testing.assert_close(batch[:1], alone, atol=1e-6, rtol=0)
    torch.testing.assert_close(batch.norm(dim=1), torch.ones(2))
