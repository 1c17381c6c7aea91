"""`leaks` where torch has expandable segments: memory goes by descriptors, and freed addresses come back."""

import os
import sys

os.environ["PYTORCH_CUDA_ALLOC_CONF"] = os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"

if __name__ == "__main__":
    import leaks

    sys.exit(leaks.main())
