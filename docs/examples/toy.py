"""The model of these examples, and what shows that weights arrived: their sum, as the engine's bfloat16."""

import os
import sys
from collections.abc import Iterable
from typing import NoReturn

import torch

WIDTH, INNER = 64, 256


def model() -> torch.nn.Sequential:
    """Two linear layers: parameters 0.weight (INNER x WIDTH), 2.weight (WIDTH x INNER), without biases."""
    torch.manual_seed(0)
    up, down = torch.nn.Linear(WIDTH, INNER, bias=False), torch.nn.Linear(INNER, WIDTH, bias=False)
    return torch.nn.Sequential(up, torch.nn.ReLU(), down)


def loss(network: torch.nn.Module) -> torch.Tensor:
    """Something to go down: the network learns to give back what it gets."""
    batch = torch.randn(32, WIDTH)
    return torch.nn.functional.mse_loss(network(batch), batch)


def checksum(weights: Iterable[torch.Tensor]) -> float:
    """Sum over all weights, cast to bfloat16: exact in double precision, so equal on both sides or not at all."""
    return sum(weight.detach().bfloat16().double().sum().item() for weight in weights)


def leave() -> NoReturn:
    """End a rank that used gloo: its threads may still free tensors, which aborts a Python that ends (torch 2.13)."""
    sys.stdout.flush()
    os._exit(0)
