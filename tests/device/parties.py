"""Trainers and engines as the device scripts need them: patient, and able to move their weights, come back, and lie.

Files in the folder `PLANTS` say what a trainer lies about (``lie``) and when that is over (``heal``); see `plants` for
what else is in it. The folder goes with this process.
"""

from __future__ import annotations

import atexit
import copy
import os
import shutil
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

FAKE = bool(os.environ.get("REFITD_FAKE_GPU"))
HERE = Path(__file__).parent
PLANTS = Path(tempfile.mkdtemp(prefix="refitd-plants-"))
if FAKE:
    import fake_bench  # noqa: F401  makes tensors of the fake GPU's memory
    import fake_gpu

import torch  # noqa: E402

from refitd.bench import clients, contest, tenant  # noqa: E402
from refitd.bench.party import Process  # noqa: E402
from refitd.hook.gpu import lend  # noqa: E402
from refitd.hook.gpu.export import identity  # noqa: E402

HEAL_SECONDS = 25.0
atexit.register(shutil.rmtree, PLANTS)  # forks leave without it


def plant_everywhere():
    """Daemons and movers that are started from here on load this folder's ``sitecustomize``, and its plants."""
    os.environ["REFITD_PLANTS"] = str(PLANTS)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])


def beside():
    """A process that looks at the card."""
    one = Process("tenant", tenant.Tenant)
    one.ask("start")
    one.answer()
    return one


def asked(process, what, step=0):
    """The answer of one process."""
    process.ask(what, step)
    return process.answer()


def _device_empty(shape):
    return clients.device_empty(shape, torch.bfloat16)


def _free(weights):
    if FAKE:
        for tensor in weights.values():
            fake_gpu.free(tensor.data_ptr())
    weights.clear()
    if not FAKE:
        torch.cuda.empty_cache()


class _Moving:
    """``weights`` of a client in other memory."""

    _driver = None

    def _move_memory(self, client, weights, step):
        """After a release: at another address in even steps; in odd ones freed first, so that the address may return.

        1 where an address has returned, which now is that of another allocation.
        """
        client.release()
        self._driver = self._driver or lend.Driver(0)
        before = {tensor.data_ptr(): self._id(tensor) for tensor in weights.values()}
        shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        old = dict(weights)
        weights.clear()
        if step % 2:
            _free(old)
        weights.update({name: _device_empty(shape) for name, shape in shapes.items()})
        _free(old)
        after = {tensor.data_ptr(): self._id(tensor) for tensor in weights.values()}
        assert not set(before.values()) & set(after.values()), (before, after)
        return float(bool(before.keys() & after.keys()))

    def _id(self, tensor):
        self._driver.activate()
        return identity(self._driver, tensor.data_ptr())


class Trainer(_Moving, clients.PatientTrainer):
    def moved(self, step):
        return self._move_memory(self._trainer, self._weights, step)

    def again(self, _step):
        """Lose the daemon and come back, as after a break of the connection."""
        client = self._trainer.client
        client._warned = True
        client.drop("it comes back")
        client._retry_at = 0.0
        _come_back(client)

    # -- lies: the file `lie` in PLANTS says which; only rank 1 lies

    def lying(self, step):
        """Publish what nobody can map; when that has been seen, take it back and publish the truth."""
        began, liar = time.monotonic(), self._trainer.client.identity.rank == 1
        lender = self._trainer._staging._lender
        if liar:
            lender._known = None
            lender.lend = partial(_lie, lender.lend, (PLANTS / "lie").read_text())
        offer = self._trainer.publish(step, self._weights)
        while not (PLANTS / "heal").exists():
            assert time.monotonic() < began + HEAL_SECONDS, "nobody has seen the lie"
            time.sleep(0.01)
        offer.released(0.0)
        if liar:
            del lender.lend
            lender._known = None
        return self.move(step)

    def far(self, _step):
        """From here on the weights are said to be on another card."""
        lender = self._trainer._staging._lender
        lender._known = None
        lender.lend = partial(_lie, lender.lend, "far")


def _come_back(client):
    deadline = time.monotonic() + clients.WAIT_SECONDS
    while not client.advance(time.monotonic() + 1.0):
        assert time.monotonic() < deadline, client.failure
        time.sleep(0.01)


def _lie(truth, what, *asked):
    told = truth(*asked)
    made = replace(told, message=copy.deepcopy(told.message))
    if what == "far":
        made.message["uuid"] = "GPU-far"
        return made
    handle = os.urandom(64).hex() if what == "garbage" else (PLANTS / "dead").read_text()
    for block in made.message["blocks"]:
        block["handle"] = handle
    return made


class Engine(_Moving, clients.EngineParty):
    def back(self, _step):
        """Come back to a daemon that was started again."""
        self._engine.client.drain()
        _come_back(self._engine.client)

    def moved(self, step):
        return self._move_memory(self._engine, self._weights, step)


class Deceased:
    """Allocates, leaves the handle of it in ``dead``, and is killed."""

    def move(self, _step):
        weights = {"w": _device_empty((1024, 1024))}
        driver = lend.Driver(0)
        driver.activate()
        base = driver.address_range(weights["w"].data_ptr())[0]
        (PLANTS / "dead").write_text(driver.ipc_handle(base).hex())
        return 0.0


contest.TrainerParty, contest.EngineParty = Trainer, Engine
