"""What clients say of weights on a GPU: golden files, said again only when the memory is another."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_daemon import TICKET, FakeDaemon, Mover, Plain

from refitd.daemon.rank import lent_memory
from refitd.errors import InputError, ProtocolError, Refused
from refitd.hook.admission import check_descriptors
from refitd.hook.engine import connect_engine
from refitd.hook.gpu.batch import Batch
from refitd.hook.messages import Ticket, check
from refitd.hook.session import Fds
from refitd.hook.trainer import connect_trainer
from refitd.layout import Layout
from refitd.mover.device import bytes_at

GOLDEN = Path(__file__).parent / "golden"
LAYOUT = Plain({"v": (64, "float32"), "w": (16, "bfloat16")})


@pytest.fixture
def daemon(tmp_path):
    one = FakeDaemon(tmp_path / "hook.sock").start()
    yield one
    one.end()


@pytest.fixture
def mover():
    one = Mover()
    yield one
    one.kill()
    os.close(one.pidfd)


def make(gpu):
    """Both storages in one block of 512 bytes, 256 bytes apart."""
    address = gpu.allocate(512)
    flat = bytes_at(address, 512, "cpu")
    return address, {"v": flat[:256].view(torch.float32), "w": flat[256:288].view(torch.bfloat16)}


def same(sent, name):
    """As in the golden file, but for what names this process's memory."""
    golden = json.loads((GOLDEN / f"request.{name}.json").read_text())
    assert check(golden) is golden
    sent = {**json.loads(json.dumps(sent)), "id": golden["id"]}
    if isinstance(sent.get("device"), dict):
        for block in sent["device"]["blocks"]:
            assert len(block["handle"]) == 128
            block["handle"], block["id"] = "0f" * 64, "17"
    assert sent == golden


def test_clients_speak_the_golden_requests(gpu, daemon, mover):
    """The device and a thread at register, the blocks at publish and receive; nothing on the host."""
    daemon.replies["receive"] = lambda session, message, fds: (
        session.event("commit", ticket=TICKET),
        mover.reply(session, message, fds),
    )[1]
    _address, weights = make(gpu)
    with connect_trainer("grpo", "run1", 0, 1, str(daemon.path)) as trainer:
        trainer.register(LAYOUT)
        trainer.publish(3, weights)
    with connect_engine("grpo", "r0", 0, 1, str(daemon.path)) as engine:
        engine.register(LAYOUT)
        engine.receive(Ticket.from_json(TICKET), weights)
    sent = {(r["method"], r.get("mode")): r for r in daemon.requests}
    same(sent["register", "in_place"], "register")
    same(sent["publish", None], "publish")
    same(sent["receive", None], "receive")


def test_memory_is_described_again_only_when_it_is_another(gpu, daemon):
    """The same block: not a word. Another block, also at the same address: all of it. After release: again."""
    address, weights = make(gpu)
    with connect_trainer("grpo", "run1", 0, 1, str(daemon.path)) as trainer:
        trainer.register(LAYOUT)

        def told(step):
            trainer.publish(step, weights)
            return next(r for r in reversed(daemon.requests) if r["method"] == "publish").get("device")

        first = told(1)
        assert [told(2), told(3)] == [None, None]
        nbytes, number, mapping = gpu._mine[address]
        gpu._mine[address] = nbytes, number + 1000, mapping  # freed, and allocated again where it was
        other = told(4)
        assert other["storages"] == first["storages"]
        assert other["blocks"][0]["id"] != first["blocks"][0]["id"]
        assert told(5) is None
        trainer.release()
        assert told(6) == other


def test_without_weights_on_a_device_nothing_of_cuda_is_loaded():
    """Neither by clients, nor by the fork server and its movers, nor by the daemon."""
    program = (
        "import sys, refitd.hook.trainer, refitd.hook.engine, refitd.mover.child, refitd.mover.forkserver,"
        " refitd.daemon.app; print([m for m in sys.modules if m.split('.')[0] in ('cuda', 'triton')"
        " or m.startswith(('refitd.mover.cuda', 'refitd.mover.kernels'))])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_weights_that_are_not_all_on_the_device_are_staged(gpu, daemon, caplog):
    """As before there were devices; the reason is logged once."""
    _address, weights = make(gpu)
    weights["v"] = torch.zeros(64)
    with connect_trainer("grpo", "run1", 0, 1, str(daemon.path)) as trainer:
        trainer.register(LAYOUT)
        for step in (1, 2):
            trainer.publish(step, weights)
    sent = [r for r in daemon.requests if r["method"] == "publish"]
    assert {entry["name"] for entry in sent[0]["memory"]} == {"v", "w"}
    assert "device" not in sent[0]
    assert [r.message for r in caplog.records] == [
        "weights on a GPU are staged on the host: they are not all on one device"
    ]


def test_publish_waits_for_the_streams_that_it_is_told_of(gpu, daemon):
    """By an event on each; for the whole device without any; for every device whose weights are staged."""
    _address, weights = make(gpu)
    side, main = (SimpleNamespace(cuda_stream=number, device=torch.device("cuda:0")) for number in (7, 9))
    other = SimpleNamespace(cuda_stream=3, device=torch.device("cuda:1"))
    with connect_trainer("grpo", "run1", 0, 1, str(daemon.path)) as trainer:
        trainer.register(LAYOUT)

        def waited(*streams):
            gpu.waited.clear()
            trainer.publish(1, weights, streams)
            return list(gpu.waited)

        assert waited() == ["device"]
        assert waited(side, main) == [7, 9]
        for wrong, got in ((other, "SimpleNamespace of cuda:1"), (7, "int of None")):
            with pytest.raises(InputError, match=f"streams: expected torch.cuda.Stream of device 0, got {got}"):
                waited(wrong)
        weights["v"] = torch.zeros(64)
        assert waited(side) == [0]
        del weights["w"]
        weights["w"] = torch.zeros(16, dtype=torch.bfloat16)
        assert waited() == []


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"uuid": 1}, "device.uuid"),
        ({"blocks": [{"kind": "ipc", "id": "1", "handle": "zz" * 64, "nbytes": 1}]}, "device.blocks[0]"),
        ({"blocks": [{"kind": "ipc", "handle": "00" * 64, "nbytes": 1}]}, "device.blocks[0]"),
        ({"blocks": [{"kind": "vmm", "id": "1", "fd": 0, "segments": [0]}]}, "device.blocks[0]"),
        ({"blocks": [{"kind": "vmm", "id": "1", "fd": 0, "segments": [4, 4]}]}, "device.blocks[0].fd"),
        ({"storages": [{"name": "w", "block": 0, "offset": -1, "nbytes": 1}]}, "device.storages[0].offset"),
    ],
)
def test_descriptions_that_make_no_sense_are_refused(change, field):
    """By the field's name, before the daemon looks at them."""
    golden = json.loads((GOLDEN / "request.publish.json").read_text())
    with pytest.raises(ProtocolError) as caught:
        check_descriptors(check({**golden, "device": {**golden["device"], **change}}), Fds([0]))
    assert caught.value.field == field


def test_the_daemon_compares_names_and_sizes_and_passes_the_rest_on():
    """The same blocks are the same memory; a storage of another size is refused; nothing lies beside a device."""
    layout = Layout.from_tensors({"w": torch.zeros(8)})
    device = {"uuid": "GPU", "blocks": [{"id": "1"}], "storages": [{"name": "w", "block": 0, "nbytes": 32}]}
    memory = lent_memory(layout, (), {"memory": [], "device": device}, Fds())
    assert memory.device is device
    assert memory.same_as(lent_memory(layout, (), {"memory": [], "device": dict(device)}, Fds()))
    moved = {**device, "blocks": [{"id": "2"}]}
    assert not memory.same_as(lent_memory(layout, (), {"memory": [], "device": moved}, Fds()))
    wrong = {**device, "storages": [{"name": "w", "block": 0, "nbytes": 28}]}
    with pytest.raises(Refused, match=r"memory\.w"):
        lent_memory(layout, (), {"memory": [], "device": wrong}, Fds())
    beside = [{"name": "w", "fd": 0, "offset": 0, "nbytes": 32}]
    with pytest.raises(Refused, match="beside memory on a device"):
        lent_memory(layout, (), {"memory": beside, "device": device}, Fds())


APPLY = {**TICKET, "kind": "apply"}


def test_a_shadow_on_the_device_is_lent_with_the_registration(gpu, daemon):
    """One block for both storages, 256 bytes apart, beside the live weights; `apply` copies what is whole in it."""
    _address, weights = make(gpu)
    with connect_engine("grpo", "r0", 0, 1, str(daemon.path)) as engine:
        with pytest.raises(InputError, match="budget: expected at least 288 bytes of device memory, got 287"):
            engine.register(LAYOUT, mode="device_shadow", budget=287)
        engine.register(LAYOUT, mode="device_shadow", budget=288)
        sent = daemon.seen("register")
        shadow = sent["shadow"]
        assert (sent["mode"], sent["device"], shadow["memory"], shadow["device"]["uuid"]) == (
            "device_shadow", gpu.UUID, [], gpu.UUID,
        )  # fmt: skip
        assert [(s["name"], s["block"], s["offset"], s["nbytes"]) for s in shadow["device"]["storages"]] == [
            ("v", 0, 0, 256), ("w", 0, 256, 32),
        ]  # fmt: skip
        mover = gpu.FakeDriver()
        opened = mover.open_ipc(bytes.fromhex(shadow["device"]["blocks"][0]["handle"]))
        arrived = torch.arange(288, dtype=torch.int32).to(torch.uint8)
        bytes_at(opened, 288, "cpu").copy_(arrived)
        weights["v"].zero_()
        daemon.page("engine/r0/0").set_shadow_publication(1, 7)
        engine.apply(Ticket.from_json(APPLY), weights)
        assert (engine.publication, engine.dirty) == ((1, 7), False)
        for name, part in (("v", arrived[:256]), ("w", arrived[256:])):
            assert torch.equal(weights[name].view(torch.uint8), part)


def test_a_shadow_that_was_released_is_lent_no_more(gpu, daemon):
    """Its memory is free, a daemon that comes back is told of none, and the next registration makes another."""
    with connect_engine("grpo", "r0", 0, 1, str(daemon.path)) as engine:
        engine.register(LAYOUT, mode="device_shadow", budget=288)
        engine.release()
        daemon.stop()
        assert engine.pending() is None
        daemon.start()
        deadline = time.monotonic() + 10
        while not engine.client.ready:
            engine.pending()
            assert time.monotonic() < deadline
        assert "shadow" not in daemon.seen("register", 2)
        engine.register(LAYOUT, mode="device_shadow", budget=288)
        first, last = daemon.seen("register")["shadow"], daemon.seen("register", 3)["shadow"]
        assert first["device"]["blocks"][0]["id"] != last["device"]["blocks"][0]["id"]


def test_a_device_that_shares_nothing_gets_its_shadow_on_the_host(gpu, daemon, monkeypatch, caplog):
    """As weights of in_place are staged there; the reason is said."""
    monkeypatch.setenv("REFITD_FAKE_GPU_FAILS", "1")
    with connect_engine("grpo", "r0", 0, 1, str(daemon.path)) as engine:
        engine.register(LAYOUT, mode="device_shadow", budget=288)
    shadow = daemon.seen("register")["shadow"]
    assert shadow["device"] is None
    assert [(entry["name"], entry["offset"]) for entry in shadow["memory"]] == [("v", 0), ("w", 256)]
    assert [record.message for record in caplog.records] == [
        "weights on a GPU are staged on the host: cuInit: CUDA_ERROR_NO_DEVICE",
        "the shadow is in host memory: there is no GPU memory here that a mover could write",
    ]


def test_a_batch_copies_every_length_and_place():
    """In the widest words that both ends allow, large ones by themselves."""
    sizes = (0, 1, 2, 3, 8, 24, 1000, 4096, 100_000)
    flat = torch.randint(0, 256, (2 * sum(sizes) + 64,), dtype=torch.uint8)
    for large in (0, 4096, 1 << 30):
        for shift in (0, 1, 2, 4):
            sources, targets, at = [], [], shift
            for nbytes in sizes:
                sources.append(flat[at : at + nbytes])
                targets.append(torch.zeros(nbytes + shift, dtype=torch.uint8)[shift:])
                at += nbytes
            Batch(list(zip(targets, sources, strict=True)), large).run()
            assert all(torch.equal(*pair) for pair in zip(targets, sources, strict=True))
