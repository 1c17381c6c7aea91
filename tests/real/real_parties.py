"""The trainer and the engine of the check, each rank a process that is told what to do over a pipe."""

import faulthandler
import os
import time
import traceback
from datetime import timedelta

import real_model
import real_tp
import torch
import torch.distributed as dist

import refitd
from refitd.hook.messages import Ticket

JOB, REPLICA, RANKS = "real", "r0", 2
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 4, 12, 32
WAIT = 30.0
SLOW = 35.0
JOIN = {"trainers": timedelta(seconds=20), "engines": timedelta(seconds=2 * WAIT)}  # engines wait for tickets too


def serve(pipe, make, *arguments):
    """In a child: make the party, then do what is asked; what fails is said with its traceback."""
    party = None
    try:
        party = make(*arguments)
        pipe.send({"value": "made"})
        while (asked := pipe.recv()) is not None:
            faulthandler.dump_traceback_later(SLOW)  # on stderr: where it hangs
            pipe.send({"value": getattr(party, asked[0])(*asked[1:])})
            faulthandler.cancel_dump_traceback_later()
        pipe.send({"value": "closed"})
    except BaseException:
        pipe.send({"error": traceback.format_exc()})
        raise


def _join(backend, folder, name, rank):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if backend == "nccl":  # two ranks on one card are refused unless they are of two hosts
        os.environ |= {"NCCL_HOSTID": f"trainer{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    where = f"file://{folder}/{name}-{backend}"
    dist.init_process_group(backend, init_method=where, rank=rank, world_size=RANKS, timeout=JOIN[name])


class Trainer:
    """FSDP2 over fp32 master weights: every rank has its shard of dimension 0, and publishes it where it is."""

    def __init__(self, rank, backend, device, source, size, folder, socket):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self._rank, self._device, self._folder = rank, device, folder
        _join(backend, folder, "trainers", rank)
        mesh = init_device_mesh(device, (RANKS,))
        torch.manual_seed(1)
        self._model = real_model.build(source, size, torch.float32, device)
        for layer in self._model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self._model, mesh=mesh)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=3e-3)
        self._random = torch.Generator().manual_seed(100 + rank)
        self._words = real_model.SIZES[size]["vocab_size"]
        self._weights = self._model.state_dict(keep_vars=True)
        self._trainer = refitd.connect_trainer(JOB, "run", rank, RANKS, socket=socket)
        self._trainer.plan_seconds = WAIT

    def first(self):
        """A step, so that a way to talk that does not work is found before anybody is registered."""
        loss = self.learn(1)
        self._trainer.register(refitd.Layout.from_module(self._model))
        return loss

    def learn(self, steps):
        """Real steps on random words; the last loss."""
        for _ in range(steps):
            ids = torch.randint(self._words, (4, 33), generator=self._random).to(self._device)
            logits = self._model(input_ids=ids[:, :-1], use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()
        return loss.item()

    def save(self, step):
        """The whole weights of now, gathered; rank 0 writes them."""
        whole = {name: weight.full_tensor().detach().cpu() for name, weight in self._weights.items()}
        if self._rank == 0:
            torch.save(whole, f"{self._folder}/{step}.pt")
        return sum(tensor.numel() for tensor in whole.values())

    def publish(self, step):
        offer = self._trainer.publish(step, self._weights)
        if offer.released(WAIT) is not refitd.RELEASED:
            raise RuntimeError(f"step {step} was skipped: {offer.reason}")
        report = offer.committed(WAIT)
        if report.committed != [REPLICA]:
            raise RuntimeError(f"step {step} was not committed: {report}")
        return type(next(iter(self._weights.values()))).__name__


class Engine:
    """One rank of a tensor-parallel engine in bf16."""

    def __init__(self, rank, device, source, size, mode, folder, socket):
        self._device, self._source, self._size, self._folder = device, source, size, folder
        _join("gloo", folder, "engines", rank)
        self._mates = real_tp.Mates(rank, RANKS)
        whole = real_model.build(source, size, torch.bfloat16, device).eval()
        shapes = {name: tuple(weight.shape) for name, weight in whole.named_parameters()}
        self._model = real_tp.cut(whole, self._mates)
        self._storages = real_tp.fuse(self._model)
        for tensor in self._storages.values():
            tensor.fill_(float("nan"))  # what is served comes from refitd or is none
        self._engine = refitd.connect_engine(JOB, REPLICA, rank, RANKS, socket=socket)
        budget = sum(tensor.nbytes + 64 for tensor in self._storages.values())
        self._engine.register(real_tp.layout(self._model, shapes, self._mates), mode=mode, budget=budget)
        random = torch.Generator().manual_seed(7)
        words = real_model.SIZES[size]["vocab_size"]
        self._prompts = torch.randint(words, (PROMPTS, PROMPT_TOKENS), generator=random).to(device)

    def refit(self, step):
        """Take the next publication at this step boundary; seconds that nothing was served."""
        pending = self._engine.pending(wait=WAIT) if self._mates.rank == 0 else None
        told = self._mates.tell(pending.to_json() if pending else None)
        if told is None:
            raise RuntimeError(f"no ticket for step {step} within {WAIT:g} s")
        began, ticket = time.monotonic(), Ticket.from_json(told)
        if ticket.kind == "apply":
            self._engine.apply(ticket, self._storages)
        else:
            self._engine.receive(ticket, self._storages, WAIT)
        if self._engine.dirty or self._engine.step != step:
            raise RuntimeError(f"wanted step {step}, serves {self._engine.step}, dirty {self._engine.dirty}")
        return time.monotonic() - began

    def spoil(self):
        """Change one bit of what is served, as a torn refit would."""
        self._storages["model.norm.weight"].view(torch.int16)[3] ^= 1

    def check(self, step):
        """Greedy tokens of what is served, of a fresh model in the same engine's code, and of a plain fresh model."""
        served, scores = self._greedy(self._model)
        fresh = real_model.build(self._source, self._size, torch.bfloat16, self._device).eval()
        saved = torch.load(f"{self._folder}/{step}.pt", map_location=self._device)
        fresh.load_state_dict({name: tensor.to(torch.bfloat16) for name, tensor in saved.items()})
        plain, _scores = self._greedy(fresh)
        real_tp.fuse(real_tp.cut(fresh, self._mates))
        expected, wanted = self._greedy(fresh)
        mine, theirs = (dict(model.named_parameters()) for model in (self._model, fresh))
        return {
            "weights_equal": mine.keys() == theirs.keys() and all(torch.equal(mine[n], theirs[n]) for n in mine),
            "tokens_equal": torch.equal(served, expected),
            "logits_equal": torch.equal(scores, wanted),
            "plain_tokens_equal": int((served == plain)[:, PROMPT_TOKENS:].sum()),
            "plain_prompts_equal": int((served == plain).all(-1).sum()),
            "tokens": served[:, PROMPT_TOKENS:].tolist(),
            "finite": bool(torch.isfinite(scores).all()),
        }

    @torch.no_grad()
    def _greedy(self, model):
        ids, scores = self._prompts, []
        for _ in range(NEW_TOKENS):
            logits = model(input_ids=ids, use_cache=False).logits[:, -1].float()
            scores.append(logits.cpu())
            ids = torch.cat((ids, logits.argmax(-1, keepdim=True)), -1)
        return ids, torch.stack(scores)
