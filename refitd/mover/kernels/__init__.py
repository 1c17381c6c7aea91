"""Packing, casting and checksumming on a GPU: one launch a bucket, or one for many."""

from refitd.mover.kernels.checksum import bucket_checksum
from refitd.mover.kernels.launch import Launch, best_backend, prepare
from refitd.mover.kernels.table import Table, gather, interleaved, reread, scatter, through, wire_offsets
from refitd.mover.kernels.touch import Touch, touch

__all__ = [
    "Launch", "Table", "Touch", "best_backend", "bucket_checksum", "gather", "interleaved", "prepare", "reread",
    "scatter", "through", "touch", "wire_offsets",
]  # fmt: skip
