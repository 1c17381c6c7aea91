"""What the parties ask of a card: a seam, so that tests can have cards that are files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

BACKEND = "nccl"  # of torch.distributed between cards
PER_CARD = "REFITD_BENCH_PER_CARD"


def share(per_card: int) -> None:
    """From here on, also in processes that are begun later: so many of a layout's cards are one."""
    os.environ[PER_CARD] = str(per_card)


def real(card: int) -> int:
    """The card that a layout's card is."""
    return card // int(os.environ.get(PER_CARD, "1"))


def use(card: int) -> torch.device:
    """Work on that card of the layout from here on, in this process."""
    torch.cuda.set_device(real(card))
    return torch.device("cuda", real(card))


def lent(numel: int, where: torch.device) -> Tensor:
    """Flat bfloat16 memory on the card in use that a mover can map; uninitialised."""
    return torch.empty(numel, dtype=torch.bfloat16, device=where)


def settle(*cards: int) -> None:
    """What was begun on the cards is done; without ``cards``, on the one in use."""
    for card in cards or (torch.cuda.current_device(),):
        torch.cuda.synchronize(card)


@contextlib.contextmanager
def aside(*cards: int) -> Iterator[None]:
    """What is begun inside waits for nothing that was begun on the cards before."""
    stream: Any = torch.cuda.Stream
    with contextlib.ExitStack() as stack:
        for card in cards:
            stack.enter_context(torch.cuda.stream(stream(device=card)))
        yield


def flush() -> None:
    """Give memory back that torch keeps for later."""
    torch.cuda.empty_cache()
