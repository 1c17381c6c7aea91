"""Python imports this at its start where this folder is on the path: the daemon's fork server gets the fake GPU too."""

import os

if os.environ.get("REFITD_FAKE_GPU"):
    import fake_gpu

    fake_gpu.install()
