"""A fake GPU in this process, in place of CUDA."""

import sys
from pathlib import Path

import fake_gpu
import pytest

from refitd.hook import engine, shadows, trainer
from refitd.hook.gpu import lend
from refitd.mover.cuda import mounts

sys.path.append(str(Path(__file__).parents[1] / "hook"))  # fake_daemon


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("REFITD_FAKE_GPU", str(tmp_path))
    monkeypatch.setattr(lend, "Driver", fake_gpu.FakeDriver)
    monkeypatch.setattr(lend, "place_of", fake_gpu.place_of)
    for module in (lend, trainer, engine):
        monkeypatch.setattr(module, "current_device", lambda: fake_gpu.UUID)
    monkeypatch.setattr(shadows, "device_empty", fake_gpu.empty)
    monkeypatch.setattr(mounts, "open_device", fake_gpu.open_device)
    monkeypatch.setattr(lend, "settle", fake_gpu.waited.extend)
    yield fake_gpu
    fake_gpu._mine.clear()
    fake_gpu.waited.clear()
