"""``python -m refitd.demo.chaos``."""

import os
import sys

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")  # read when numpy and torch are first imported; many processes share the cores

from refitd.demo.chaos.command import main  # noqa: E402

sys.exit(main())
