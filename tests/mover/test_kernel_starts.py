"""Kernels that are started by the driver's own calls, on a driver that notes what it is given."""
# ruff: noqa: N802

import ctypes
from types import SimpleNamespace

import pytest
import torch

from refitd.mover.kernels import starts
from refitd.mover.kernels.starts import Event, start_of

ADDRESSES = [1 << 20, 2 << 20, 3 << 20]


class Cuda:
    """``status``: of every call."""

    def __init__(self, status=0):
        self.status, self.launched, self.called = status, [], []

    def cuLaunchKernel(self, function, gx, gy, gz, bx, by, bz, shared, stream, params, extra):
        found = [ctypes.c_uint64.from_address(params[i]).value for i in range(len(params))]
        grid, block = [number.value for number in (gx, gy, gz)], [number.value for number in (bx, by, bz)]
        self.launched.append((function.value, grid, block, shared.value, stream, found, extra))
        return self.status

    def cuEventRecord(self, event, stream):
        self.called.append(("record", event.value, stream))
        return self.status

    def cuEventSynchronize(self, event):
        self.called.append(("wait", event.value))
        return self.status

    def cuGetErrorString(self, status, text):
        text._obj.value = f"error {status.value} was encountered".encode()
        return 0


@pytest.fixture
def cuda(monkeypatch):
    made = Cuda()
    monkeypatch.setattr(starts, "_cuda", lambda: made)
    return made


class Compiled:
    """What Triton returns for a launch; notes when it starts it itself."""

    def __init__(self, **more):
        self.function, self.started = 0x7F00, []
        self.metadata = SimpleNamespace(num_warps=4, shared=64, num_ctas=1, global_scratch_size=0, **more)

    def __getitem__(self, grid):
        return lambda *arguments, stream: self.started.append((grid, arguments, stream))


def _tensors():
    return [SimpleNamespace(data_ptr=lambda address=address: address) for address in ADDRESSES]


def test_a_kernel_is_started_with_its_pointers_and_two_more_for_scratch(cuda):
    """Constants are compiled into it; every start is the same but for the stream."""
    start = start_of(Compiled(), 5, [*_tensors(), torch.int64, True, 7])
    start(9)
    start(10)
    one = (0x7F00, [5, 1, 1], [128, 1, 1], 64, 9, [*ADDRESSES, 0, 0], None)
    assert cuda.launched == [one, (*one[:4], 10, *one[5:])]


def test_a_grid_of_nothing_is_not_started(cuda):
    """The driver would refuse it."""
    start_of(Compiled(), 0, _tensors())(9)
    assert cuda.launched == []


@pytest.mark.parametrize("special", ["launch_pdl", "launch_cooperative_grid", "profile_scratch_size"])
def test_a_kernel_that_takes_more_is_started_by_triton(cuda, special):
    """What a later Triton adds is not guessed at."""
    compiled, arguments = Compiled(**{special: 1}), [*_tensors(), True]
    start_of(compiled, 5, arguments)(9)
    assert (cuda.launched, compiled.started) == ([], [((5, 1, 1), tuple(arguments), 9)])


def test_an_event_is_recorded_and_waited_for_by_its_handle(cuda, monkeypatch):
    """Torch makes it, and gives it a handle when it is first recorded."""
    recorded = []
    made = SimpleNamespace(record=lambda: recorded.append(True), cuda_event=77)
    monkeypatch.setattr(torch.cuda, "Event", lambda: made)
    event = Event()
    event.record(9)
    event.wait()
    assert (recorded, cuda.called) == ([True], [("record", 77, 9), ("wait", 77)])


def test_what_the_driver_says_is_an_error_as_torch_has_it(cuda):
    """A RuntimeError that names the call; callers make a DeviceError of it."""
    start = start_of(Compiled(), 5, _tensors())
    cuda.status = 700
    with pytest.raises(RuntimeError, match=r"^CUDA error: error 700 was encountered \(cuLaunchKernel, 700\)$"):
        start(9)
