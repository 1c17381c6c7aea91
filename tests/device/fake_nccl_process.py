"""The fake NCCL in place of nccl4py, in daemons and movers. ``REFITD_FAKE_NCCL`` is a folder.

``<rank with / as _>.json`` in it are the rank's faults (see `Faults`), ``version.json`` its version where it is not the
usual one.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from refitd.bench.fake_nccl import FakeNccl, Faults

VERSION = "2.30.7"


def install():
    """In this process, before the daemon or a mover asks for NCCL."""
    folder = Path(os.environ["REFITD_FAKE_NCCL"])
    told = folder / "version.json"

    def open_library(host):
        key = host.partition("#")[2].replace("/", "_")
        return FakeNccl(Faults(network=True, file=folder / f"{key}.json"), VERSION)

    def library_versions():
        found = json.loads(told.read_text()) if told.exists() else VERSION
        return {"torch": "0", "nccl": found, "nccl4py": "0.6.0"}

    from refitd.daemon import wiring
    from refitd.mover.nccl import opening

    opening.open_library, wiring.library_versions = open_library, library_versions
