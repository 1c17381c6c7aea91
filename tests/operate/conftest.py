"""The fake NVML of the daemon's tests is the doctor's, too."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "daemon"))  # fake_nvml
