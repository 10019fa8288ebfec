"""Networks and batches for the search of the largest batch, which other processes import."""

import os

import torch
from torch import nn

import redivider as rd

WIDTH, DEPTH = 64, 8
VALUES = 16  # rows of a sample


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


def make_model(backward="store"):
    torch.manual_seed(0)
    return rd.Chain([Block() for _ in range(DEPTH)], backward=backward)


def make_batch(size):
    return torch.randn(size, VALUES, WIDTH)


def make_keywords(size):
    return {"x": make_batch(size)}


def failing_step(model, batch):
    raise KeyError("no such layer")


def dying_step(model, batch):
    os._exit(3)


class Keyword(nn.Module):
    def __init__(self):
        super().__init__()
        self.chain = make_model()

    def forward(self, x):
        return {"y": self.chain(x)}


class WithOptimizer:
    """A step whose optimizer makes its state in the first one."""

    def __init__(self):
        self.optimizer = None

    def __call__(self, model, batch):
        if self.optimizer is None:
            self.optimizer = torch.optim.AdamW(model.parameters())
        model(batch).sum().backward()
        self.optimizer.step()
