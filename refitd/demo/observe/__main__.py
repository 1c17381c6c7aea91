"""``python -m refitd.demo.observe``: see `refitd.demo.observe.command`."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")  # read when numpy and torch are first imported; many processes share the cores
    from refitd.demo.observe.command import main

    sys.exit(main())
