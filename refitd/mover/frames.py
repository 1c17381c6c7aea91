"""What travels on an edge: a hello each way, then buckets of header, payload and trailer.

A bucket without its trailer does not exist. A sender that finds its loan withdrawn ends the bucket with a void trailer,
so that the stream stays in step, and a void header tells the receiver why. Integers are little-endian.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from refitd.errors import ProtocolError
from refitd.hook import wire

_HEADER = struct.Struct("<4sQQQQQ8s")
_TRAILER = struct.Struct("<4sQQQQQ")
_HEADER_MAGIC, _TRAILER_MAGIC, _VOID_MAGIC, _VOID_TRAILER_MAGIC = b"rfB1", b"rfT1", b"rfV1", b"rfW1"
HEADER_BYTES, TRAILER_BYTES = _HEADER.size, _TRAILER.size
HELLO_LIMIT = 64 << 10
REASON_LIMIT = 1024
LENGTH_BYTES = 4


@dataclass(frozen=True, slots=True)
class Header:
    """Announces one bucket. ``plan`` is the `plan_tag` of the plan that numbers the buckets.

    ``void`` says that the sender's loan was withdrawn: no payload follows and no further bucket of this attempt.
    """

    attempt: int
    publication: tuple[int, int]
    bucket: int
    nbytes: int
    plan: bytes
    void: bool = False

    def pack(self) -> bytes:
        magic = _VOID_MAGIC if self.void else _HEADER_MAGIC
        return _HEADER.pack(magic, self.attempt, *self.publication, self.bucket, self.nbytes, self.plan)

    @classmethod
    def unpack(cls, data: bytes | bytearray) -> Header:
        """Raises ProtocolError where these bytes are not a header."""
        magic, attempt, generation, revision, bucket, nbytes, plan = _HEADER.unpack(data)
        if magic not in (_HEADER_MAGIC, _VOID_MAGIC):
            raise ProtocolError("bucket header", repr(_HEADER_MAGIC), repr(magic))
        return cls(attempt, (generation, revision), bucket, nbytes, plan, magic == _VOID_MAGIC)


@dataclass(frozen=True, slots=True)
class Trailer:
    """Makes the bucket before it real. A ``void`` one says that it never will be, and keeps the stream in step."""

    attempt: int
    publication: tuple[int, int]
    token: int
    checksum: int
    void: bool = False

    def pack(self) -> bytes:
        magic = _VOID_TRAILER_MAGIC if self.void else _TRAILER_MAGIC
        return _TRAILER.pack(magic, self.attempt, *self.publication, self.token, self.checksum)

    @classmethod
    def unpack(cls, data: bytes | bytearray) -> Trailer:
        """Raises ProtocolError where these bytes are not a trailer."""
        magic, attempt, generation, revision, token, checksum = _TRAILER.unpack(data)
        if magic not in (_TRAILER_MAGIC, _VOID_TRAILER_MAGIC):
            raise ProtocolError("bucket trailer", repr(_TRAILER_MAGIC), repr(magic))
        return cls(attempt, (generation, revision), token, checksum, magic == _VOID_TRAILER_MAGIC)


@dataclass(frozen=True, slots=True)
class Hello:
    """Warms an edge: both ends must mean the same lane, token, edge and plan."""

    lane: str
    token: int
    src: str
    dst: str
    digest: str

    def pack(self) -> bytes:
        fields = {name: getattr(self, name) for name in self.__slots__}
        return wire.encode({"kind": "hello", **fields})

    @classmethod
    def parse(cls, message: wire.Message) -> Hello:
        """Raises ProtocolError where the message is not a hello."""
        if message.get("kind") != "hello" or type(message.get("token")) is not int:
            raise ProtocolError("edge hello", "kind hello with a token", repr(message)[:80])
        return cls(str(message.get("lane")), message["token"], *_names(message))

    def check(self, other: Hello) -> None:
        """Raises ProtocolError naming the first field in which the peer's hello differs from ours."""
        for name in self.__slots__:
            if (ours := getattr(self, name)) != (theirs := getattr(other, name)):
                raise ProtocolError(f"edge {name}", repr(ours), repr(theirs))


def _names(message: wire.Message) -> tuple[str, str, str]:
    return str(message.get("src")), str(message.get("dst")), str(message.get("digest"))


def plan_tag(digest: str) -> bytes:
    """Eight bytes that stand for a plan's digest in a header."""
    return xxhash.xxh3_64_digest(digest.encode())


class Checksum:
    """A checksum that depends on the place of every byte and on the bucket they belong to; fed in any chunks."""

    def __init__(self, bucket: int) -> None:
        self._state = xxhash.xxh3_64(seed=bucket)

    def update(self, chunk: memoryview) -> None:
        self._state.update(chunk)

    @property
    def value(self) -> int:
        return int(self._state.intdigest())


def checksum(payload: memoryview, bucket: int) -> int:
    """The `Checksum` of a whole bucket."""
    return int(xxhash.xxh3_64_intdigest(payload, seed=bucket))
