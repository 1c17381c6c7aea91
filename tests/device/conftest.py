"""A fake GPU in this process, in place of CUDA."""

import sys
from pathlib import Path

import fake_gpu
import pytest
from pull_rig import Rig, make_program

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


@pytest.fixture
def rig(gpu):
    """Makes a `Rig` of a program; each is closed."""
    made = []

    def make(program=None, **options):
        made.append(Rig(gpu, program or make_program(), **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
