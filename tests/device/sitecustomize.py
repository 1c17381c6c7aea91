"""Python imports this at its start where this folder is on the path: the daemon's fork server gets the fakes too."""

import os
import sys

if os.environ.get("REFITD_FAKE_GPU"):
    import fake_gpu

    fake_gpu.install()
if os.environ.get("REFITD_FAKE_NCCL"):
    import fake_nccl_process

    fake_nccl_process.install()
if os.environ.get("REFITD_NO_ETCD"):
    sys.modules["etcd3"] = None  # as on a machine that has none
if os.environ.get("REFITD_PLANTS"):
    import plants

    plants.install()
