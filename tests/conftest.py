"""What all tests share."""

from __future__ import annotations

import contextlib

with contextlib.suppress(ImportError):  # `make test-gpu` may have an interpreter without it, and needs none
    from hypothesis import settings

    settings.register_profile("refitd", deadline=None)  # a loaded machine is slow, and that is no failure
    settings.load_profile("refitd")
