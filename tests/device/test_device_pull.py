"""A mover's rounds on memory of a device, by a fake one: what counts, what does not, and when it lets go."""

import gc
import os
import queue
import subprocess
import threading
import time

import numpy as np
import pytest
from pull_rig import COLS, OWNERS, READER, ROWS, Owner, failures, make_program

from refitd.errors import DeviceError, ProtocolError
from refitd.mover.cuda import pull
from refitd.mover.cuda.groups import batches, groups
from refitd.mover.cuda.mounts import Devices
from refitd.mover.cuda.warm import tables
from refitd.mover.kernels import Launch, bucket_checksum
from refitd.mover.reading import Reading
from refitd.mover.round import Round, RunOptions
from refitd.plan import execute
from refitd.plan.program import PEER


@pytest.mark.parametrize("verify", ["trailer", "reread"])
@pytest.mark.parametrize("dtypes", [("bfloat16", "bfloat16"), ("float32", "bfloat16")])
def test_buckets_of_two_owners_arrive_in_one_launch_and_their_sums_are_the_buckets(rig, verify, dtypes, monkeypatch):
    """Bit-exact, cast on the way where the plan says so; what kernels summed is the checksum of the packed bucket."""
    launched = []
    monkeypatch.setattr(pull, "through", lambda *a, made=pull.through: launched.append(len(a[1])) or made(*a))
    one = rig(make_program(dtypes))
    one.mount()
    one.build()
    one.run(verify=verify)
    done = one.wait("done")
    assert (done["verified"], done["rx"]) == (list(range(8)), {PEER: ROWS * COLS // 2 * 2})
    assert done["span"][0] < done["span"][1]
    assert one.mine.bytes.tolist() == one.expected().tolist()
    for bucket in one.program.buckets:
        owner = one.ranks[OWNERS.index(bucket.src)]
        packed = execute.pack(one.program, bucket, {"w": owner.bytes.view(execute.array_dtype(dtypes[0]))})
        assert one.round().sums[bucket.id] == bucket_checksum(one.program, bucket, packed)
    one.ranks[0].bytes[:] = 7
    one.run(attempt=2, verify=verify)
    one.wait("done")
    assert one.mine.bytes.tolist() == one.expected().tolist()
    assert launched == [8]  # prepared once, as the memory stayed where it was


@pytest.mark.parametrize(
    "on_device", [(False, True, True), (True, True, False), (False, False, True)], ids=["one", "to host", "from host"]
)
@pytest.mark.parametrize("verify", ["trailer", "reread"])
def test_edges_between_host_and_device_go_by_way_of_the_host(rig, on_device, verify):
    """Whatever is mounted moves: the buckets of both kinds of edges arrive."""
    one = rig(make_program(("float32", "bfloat16")), on_device=on_device)
    one.mount()
    one.build()
    one.run(verify=verify)
    assert one.wait("done")["verified"] == list(range(8))
    assert one.mine.bytes.tolist() == one.expected().tolist()


def test_what_was_read_under_a_loan_that_ended_meanwhile_does_not_count(rig, monkeypatch):
    """The word is read again when the launch is done; the other lender's buckets count."""
    one = rig()

    def through(*arguments, made=pull.through):
        one.ranks[1].page.bump_loan()
        return made(*arguments)

    monkeypatch.setattr(pull, "through", through)
    one.mount()
    one.build()
    one.run()
    failed, _verified = failures(one, 1)
    assert failed == {(OWNERS[1], READER): "loan withdrawn"}
    while len(one.round().verified) < 4:
        time.sleep(0.01)
    assert one.round().verified == {0, 1, 2, 3}


def test_an_old_word_and_a_missing_memory_fail_their_edges_only(rig):
    """Before anything is launched for them."""
    one = rig()
    one.mount()
    one.build()
    words = {rank.key: rank.page.loan_word for rank in one.ranks}
    one.run(words={**words, OWNERS[0]: words[OWNERS[0]] + 1})
    assert failures(one, 1)[0] == {(OWNERS[0], READER): "loan withdrawn"}
    while len(one.round().verified) < 4:  # else that memory goes in the middle of this round
        time.sleep(0.01)
    one.mover.handle({"kind": "unmount", "memory": OWNERS[1]}, [])
    one.run(attempt=2)
    assert failures(one, 1)[0] == {(OWNERS[1], READER): f"memory of {OWNERS[1]} is not mounted"}


def test_what_was_written_differently_is_found_by_reading_it_again(rig, monkeypatch):
    """``verify = "reread"`` compares the two sums of each bucket."""
    one = rig()

    def reread(*arguments, made=pull.reread):
        one.mine.bytes[-1] ^= 0  # the table is made before the launch: it reads from another place, below
        table = made(*arguments)
        table.rows[-1, 0] += 2
        return table

    monkeypatch.setattr(pull, "reread", reread)
    one.mount()
    one.build()
    one.run(verify="reread")
    failed, _verified = failures(one, 1)
    assert failed == {(OWNERS[1], READER): "bucket 7 reads back differently"}


def test_the_memory_of_a_dead_owner_is_unmapped_at_once(gpu):
    """By its pidfd, without a word of the daemon; so is memory that is unmounted or mounted anew."""
    program, devices = make_program(), Devices(READER)
    owner = Owner(gpu, OWNERS[0], program.storages[0])
    sleeper = subprocess.Popen(["sleep", "60"])
    fds = [os.pidfd_open(sleeper.pid), owner.page.fd]
    message = {"memory": owner.key, "writable": False, "word_index": 0, "device": owner.message}
    memory = devices.mount(message, fds)
    driver = memory.device.driver
    assert len(driver.opened) == 1
    bucket = program.buckets[0]
    with memory.pinned(bucket):  # as if a launch were under way
        sleeper.kill()
        sleeper.wait()
        time.sleep(0.1)
        assert len(driver.opened) == 1
    deadline = time.monotonic() + 5
    while driver.opened and time.monotonic() < deadline:
        time.sleep(0.005)
    assert driver.opened == {}
    with pytest.raises(Exception, match="mapped no more"), memory.pinned(bucket):
        pass
    memory.close()
    os.close(fds[0])
    owner.page.close()


def test_unmounted_memory_is_unmapped_before_the_mover_says_so(rig):
    """Also what is mounted a second time: the first mapping goes."""
    one = rig()
    one.mount()
    driver = one.mover._memories[READER].device.driver
    assert len(driver.opened) == 3
    one.ranks[0].mount(one.mover)
    assert len(driver.opened) == 3
    one.mover.handle({"kind": "unmount", "memory": OWNERS[0]}, [])
    one.wait("unmounted")
    assert len(driver.opened) == 2
    one.mover.close()
    assert driver.opened == {}


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        ({"uuid": "GPU-other"}, "DeviceError: cuDeviceGetUuid: no device GPU-other"),
        ({"blocks": []}, "ProtocolError: storage w block: expected an index below 0, got 0"),
        ({"uuid": 5}, "ProtocolError: device.uuid: expected text, got int 5"),
    ],
)
def test_memory_that_cannot_be_mounted_is_told_with_its_reason(rig, device, reason):
    """A device that is not there, and messages that make no sense."""
    one = rig()
    one.mine.message = {**one.mine.message, **device}
    one.mine.mount(one.mover)
    assert one.said.get(timeout=5) == {"kind": "failed", "memory": READER, "reason": reason}


def test_a_lane_is_built_when_its_kernels_are_ready(rig, monkeypatch, gpu):
    """Compiled from the program alone, for all kinds of rows that the round will have; a device that fails is told."""
    prepared = []
    real = gpu.Device.prepare

    def prepare(self, table, kinds=0):
        prepared.append((table.dtypes, table.store, len(table.tiles), kinds | table.kinds))
        return real(self, table, kinds)

    monkeypatch.setattr(gpu.Device, "prepare", prepare)
    one = rig(make_program(("float32", "bfloat16")))
    one.build(device=gpu.UUID)
    warmed = {(dtypes, store): kinds for dtypes, store, tiles, kinds in prepared if not tiles}
    assert set(warmed) == {(("float32", "bfloat16"), True), (("bfloat16", "bfloat16"), False)}
    one.mount()
    one.run(verify="reread")
    one.wait("done")
    assert len(prepared) == 4
    for dtypes, store, _tiles, kinds in prepared[2:]:
        assert kinds | warmed[dtypes, store] == warmed[dtypes, store]


def test_a_device_that_does_not_start_keeps_no_lane_from_being_built(rig, gpu, capfd):
    """It says so when memory is mounted; until then there may be none on it."""
    one = rig()
    one.build(device="GPU-other")
    assert "kernels are not ready: cuDeviceGetUuid: no device GPU-other" in capfd.readouterr().err


def test_a_sender_reads_a_device_by_whole_buckets(rig):
    """For TCP: packed as on the CPU, cast, under the loan."""
    one = rig(make_program(("float32", "bfloat16")))
    one.mount()
    words = {rank.key: rank.page.loan_word for rank in one.ranks}
    round_ = Round(one.program, RunOptions(1, (1, 1), words), one.mover._memories, threading.Condition())
    round_.open()
    for bucket in one.program.buckets:
        owner = one.ranks[OWNERS.index(bucket.src)]
        block = Reading(round_, bucket).read()
        assert block.tolist() == execute.pack(one.program, bucket, {"w": owner.bytes.view(np.float32)}).tolist()


def test_nothing_is_kept_for_memory_that_is_mapped_no_more(rig):
    """Neither what was prepared for it, which is on the device, nor the descriptor of its page; its word is known."""
    one = rig()
    one.mount()
    one.build()
    one.run()
    one.wait("done")
    gc.collect()
    descriptors, kept = len(os.listdir("/proc/self/fd")), one.mover._memories[OWNERS[0]]
    for attempt in range(2, 5):
        one.ranks[0].mount(one.mover)
        one.run(attempt=attempt)
        one.wait("done")
    assert len(one.mover._lanes["r0"]._peer._worker._puller._kept) == 1
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    assert (kept.closed, kept.word) == (True, one.ranks[0].page.loan_word)


def test_memory_that_is_mapped_for_another_device_is_not_touched(rig, gpu):
    """A kernel would die of its addresses, and the mover with it."""
    one = rig()
    one.mount()
    one.build()
    one.mover._memories[OWNERS[0]].device = gpu.open_device(gpu.UUID)
    one.run()
    failed, _verified = failures(one, 1)
    assert set(failed) == {(OWNERS[0], READER)}
    assert "is mapped for GPU-fake" in failed[OWNERS[0], READER]


def test_errors_of_the_device_are_typed(gpu, monkeypatch):
    """Torch's errors for a full or broken device become DeviceError, which ends the mover."""
    device = gpu.open_device(gpu.UUID)
    table = next(tables(make_program()))

    def prepare(*arguments, **options):
        raise RuntimeError("CUDA out of memory.\nmore")

    monkeypatch.setattr("refitd.mover.cuda.device.prepare", prepare)
    with pytest.raises(DeviceError, match=r"prepare a launch: RuntimeError: CUDA out of memory\.$"):
        device.prepare(table)


def test_an_error_of_the_device_ends_the_mover(rig, monkeypatch):
    """It reaches `threading.excepthook`, by which a mover's process ends; no bucket counts."""
    one, ended = rig(), queue.Queue()
    monkeypatch.setattr(threading, "excepthook", ended.put)

    def through(*arguments):
        raise DeviceError("move buckets", "CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(pull, "through", through)
    one.mount()
    one.build()
    one.run()
    fatal = ended.get(timeout=10)
    assert (fatal.exc_type, fatal.exc_value.call) == (DeviceError, "move buckets")
    assert one.round().verified == set()


def test_launches_of_several_dtypes_are_under_way_before_the_first_is_waited_for(rig, monkeypatch):
    """A launch for each pair of dtypes, and bit-exact; their buckets count together, when all loan words were read."""
    program = make_program()
    program.storages[1] = program.storages[1]._replace(dtype="float32")
    did = []
    real = {name: getattr(Launch, name) for name in ("run", "checksums")}
    for name in real:
        monkeypatch.setattr(Launch, name, lambda self, name=name: did.append(name) or real[name](self))
    one = rig(program)
    one.mount()
    one.build()
    one.run()
    assert one.wait("done")["verified"] == list(range(8))
    assert one.mine.bytes.tolist() == one.expected().tolist()
    assert did == ["run", "run", "checksums", "checksums"]


def test_groups_are_started_together_up_to_a_limit():
    """A group that is larger than it is alone."""
    program = make_program()
    size = program.buckets[0].nbytes
    alone = [[bucket] for bucket in program.buckets[:5]]
    assert batches(alone, 2 * size) == [alone[0:2], alone[2:4], alone[4:]]
    assert batches([list(program.buckets[:3]), alone[3]], 2 * size) == [[list(program.buckets[:3])], [alone[3]]]
    assert batches([], size) == []


def test_launches_have_one_pair_of_dtypes_and_a_limit():
    """So that a revoke waits for one launch at most."""
    program = make_program()
    sizes = [[bucket.id for bucket in group] for group in groups(program, program.buckets, 400)]
    assert sizes == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [len(group) for group in groups(program, program.buckets, 1)] == [1] * 8


def test_a_size_that_is_not_the_plans_is_refused(rig):
    """By the storage's name, before its memory is touched."""
    one = rig()
    one.mine.message["storages"][0]["nbytes"] -= 2
    one.mount()
    one.build()
    one.run()
    failed, _verified = failures(one, 2)
    assert set(failed) == {(key, READER) for key in OWNERS}
    assert all(f"storage w of {READER}" in reason for reason in failed.values())
    with pytest.raises(ProtocolError, match="1536 bytes"):
        one.mover._memories[READER].check(one.program.storages[2:])
