"""A real engine: ``python tests/real/real_check.py --device cuda``. Prints one JSON object; 0 where all is equal.

An FSDP2 trainer of two ranks takes real steps on fp32 master weights; a tensor-parallel engine of two ranks serves
Qwen3 in bf16 from the shards that refitd wrote. After each refit the engine's greedy tokens must be those of a fresh
model loaded from that step's weights, run by the same two ranks (bit for bit), and are compared with those of a plain
fresh model in one process.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version

import real_parties
import torch

from refitd.errors import RefitdError
from refitd.testing import LocalDaemon, wait_until

ANSWER = 45.0
PATIENT = {"timeouts.offer": 30.0, "timeouts.build": 60.0}  # kernels are compiled for the first lane
BACKENDS = {"cpu": ("gloo",), "cuda": ("nccl", "gloo", "cpu")}  # "cpu": gloo, and the trainer's weights on the host


class Failed(Exception):
    pass


class Party:
    """A rank in a process of its own, forked before anybody here has touched CUDA: importing takes long."""

    def __init__(self, name, make, *arguments):
        context = multiprocessing.get_context("fork")
        self.name, (self._pipe, theirs) = name, context.Pipe()
        self._process = context.Process(target=real_parties.serve, args=(theirs, make, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, *what):
        self._pipe.send(what)

    def answer(self):
        try:
            if not self._pipe.poll(ANSWER):
                raise Failed(f"{self.name}: no answer within {ANSWER:g} s")
            said = self._pipe.recv()
        except (EOFError, OSError) as error:
            self._process.join(1)
            raise Failed(f"{self.name}: ended with {self._process.exitcode}: {error!r}") from error
        if "error" in said:
            raise Failed(f"{self.name}: {said['error']}")
        return said["value"]

    def end(self):
        self._process.kill()
        self._process.join()
        self._pipe.close()


def ask_all(parties, *what):
    for party in parties:
        party.ask(*what)
    return [party.answer() for party in parties]


def start_trainers(arguments, folder, socket, tried):
    """By the first way to talk that takes a step; why the others did not is added to ``tried``."""
    ways = BACKENDS[arguments.device] if arguments.trainer == "auto" else (arguments.trainer,)
    for way in ways:
        backend, device = ("gloo", "cpu") if way == "cpu" else (way, arguments.device)
        model = arguments.model, arguments.size
        parties = [
            Party(
                f"trainer{rank}",
                real_parties.Trainer,
                rank,
                backend,
                device,
                *model,
                f"{folder}/{way}",
                socket,
            )
            for rank in range(real_parties.RANKS)
        ]
        try:
            for party in parties:
                party.answer()
            ask_all(parties, "first")
        except Failed as error:
            tried[way] = str(error)[-1500:]
            for party in parties:
                party.end()
            continue
        return f"FSDP2 (fully_shard) over {backend}, weights on {device}", f"{folder}/{way}", parties
    raise Failed(f"no way to train: {tried}")


def refit(step, arguments, trainers, engines):
    """One refit, and what came of it."""
    loss = ask_all(trainers, "learn", arguments.steps)[0]
    parameters = ask_all(trainers, "save", step)[0]
    for engine in engines:
        engine.ask("refit", step)
    for trainer in trainers:
        trainer.ask("publish", step)
    paused = max(engine.answer() for engine in engines)
    kinds = [trainer.answer() for trainer in trainers]
    if step == arguments.spoil:
        ask_all(engines[:1], "spoil")
    found = ask_all(engines, "check", step)
    lead = found[0]
    equal = all(one[what] for one in found for what in ("weights_equal", "tokens_equal", "logits_equal", "finite"))
    return {
        "step": step, "loss": loss, "parameters": parameters, "weights": kinds, "paused_ms": paused * 1e3,
        "equal": equal and found[1]["tokens"] == lead["tokens"], "ranks": [_words(one) for one in found],
        "first_tokens": lead["tokens"][0][:8],
    }  # fmt: skip


def _words(found):
    return {name: value for name, value in found.items() if name != "tokens"}


def lane_is_built(daemon):
    lanes = daemon.status()["jobs"][real_parties.JOB]["lanes"]
    return [(lane["stage"], len(lane["sources"]), len(lane["members"])) for lane in lanes] == [("idle", 2, 2)]


def check(arguments):
    tried, parties, began = {}, [], time.monotonic()
    with tempfile.TemporaryDirectory() as folder, LocalDaemon(config=PATIENT) as daemon:
        try:
            for way in ("nccl", "gloo", "cpu"):
                os.mkdir(f"{folder}/{way}")
            trainer, folder_of_weights, trainers = start_trainers(arguments, folder, daemon.socket, tried)
            parties += trainers
            about = arguments.device, arguments.model, arguments.size, arguments.mode
            engines = [
                Party(
                    f"engine{rank}",
                    real_parties.Engine,
                    rank,
                    *about,
                    folder_of_weights,
                    daemon.socket,
                )
                for rank in range(real_parties.RANKS)
            ]
            parties += engines
            for engine in engines:
                engine.answer()
            wait_until(lambda: lane_is_built(daemon), "a lane from both trainers to both engines", ANSWER)
            started = time.monotonic() - began
            refits = [refit(step, arguments, trainers, engines) for step in range(1, arguments.refits + 1)]
        except (Failed, RefitdError) as error:
            raise Failed(f"{error}\ntried: {tried}\nthe daemon: {daemon.log[-3000:]}") from error
        finally:
            for party in parties:
                party.end()
    return {
        "ok": all(one["equal"] for one in refits), "refits": refits, "trainer": trainer, "tried": tried,
        "tokens": real_parties.PROMPTS * real_parties.NEW_TOKENS, "mode": arguments.mode, "device": arguments.device,
        "model": arguments.model, "attention": "sdpa", "torch": torch.__version__, "transformers": _version(),
        "start_seconds": started, "seconds": time.monotonic() - began,
    }  # fmt: skip


def _version():
    try:
        return version("transformers")
    except PackageNotFoundError:
        return "none"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", choices=("transformers", "own"), default="transformers")
    parser.add_argument("--size", choices=("tiny", "card"), default="tiny")
    parser.add_argument("--mode", choices=("in_place", "host_shadow", "device_shadow"), default="in_place")
    parser.add_argument("--trainer", choices=("auto", "nccl", "gloo", "cpu"), default="auto")
    parser.add_argument("--refits", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps before each refit")
    parser.add_argument("--spoil", type=int, metavar="STEP", help="a wrong bit after this refit, which must be found")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # a thread pool does not survive a fork
    if arguments.model == "transformers":
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # a fork cannot use a driver that was asked before
        from transformers import Qwen3ForCausalLM  # noqa: F401  once, before the ranks are forked
    try:
        document = check(arguments)
    except Failed as error:
        print(error, file=sys.stderr)
        document = {"ok": False, "reason": str(error)[:3000]}
    print(json.dumps(document))
    return 0 if document["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
