"""PETRA and its kin, straight from the equations: explicit histories, plain autograd, no library.

The full history is kept: the weights of every stage in every slot (half a tick), and the input of
every unit for every micro-batch. A method is then a choice of indices into it.
"""

import copy
from collections import defaultdict
from typing import Any

import torch
from torch.func import functional_call

import redivider as rd

# method: (weights of the gradient, weights of the inverse or None where inputs are kept)
METHODS = {
    "petra": ("now", "now"),
    "dsp": ("now", None),
    "delayed": ("then", None),
    "delayed-graph": ("then", None),
    "exact-inverse": ("then", "then"),
    "approximate-input": ("then", "now"),
}


class Reference:
    def __init__(
        self,
        units,
        cut,
        *,
        loss,
        method,
        accumulate,
        latency,
        optimizer,
        lr_lambda=None,
        lookahead=None,
        lr_by_delay=False,
    ):
        self.units = copy.deepcopy(list(units))
        self.J, self.k, self.loss = len(cut), accumulate, loss
        latencies = latency if isinstance(latency, list) else [latency] * (len(cut) - 1)
        # Halves of a tick that a message travels from stage 0 to stage j.
        self.up = [round(2 * sum(latencies[:j])) for j in range(len(cut))]
        starts = [sum(cut[:j]) for j in range(len(cut))]
        self.stages = [list(range(s, s + size)) for s, size in zip(starts, cut, strict=True)]
        self.gradient_by, self.inverse_by = METHODS[method]
        self.optimizers = {}
        for j, stage in enumerate(self.stages):
            parameters = [p for u in stage for p in self.units[u].parameters()]
            if parameters:
                self.optimizers[j] = optimizer(parameters)
        late = [(self.up[-1] - up) / accumulate for up in self.up]  # in updates
        self.rates = {
            j: [float(group["lr"]) / (1 + late[j] * lr_by_delay) for group in o.param_groups]
            for j, o in self.optimizers.items()
        }
        self.lr_lambda = lr_lambda or (lambda update: 1.0)
        self.lookahead = lookahead
        self.moved: dict[tuple[int, str], Any] = {}  # by the last update
        self.before: list[dict[tuple[int, str], Any]] = [{} for _ in cut]  # before the last update
        self.reset()
        self.sums: list[defaultdict[tuple[int, str], Any]] = [defaultdict(float) for _ in cut]
        self.counts, self.updates = [0] * self.J, [0] * self.J
        self.losses, self.gradients = [], []

    def reset(self):
        self.t, self.batches = 0, []
        self.weights = []  # [slot][unit]
        self.used = {}  # [n, unit]: the weights of its forward
        self.inputs = {}  # [n, unit]: the input of the unit's forward
        self.outputs = {}  # [n, j]: the output of stage j's forward
        self.back = {}  # [n, j]: (output of stage j as rebuilt above, gradient of it)

    def tick(self, batch=None):
        if batch is not None:
            self.batches.append(batch)
        for slot in (2 * self.t, 2 * self.t + 1):
            self.run_slot(slot)
        self.t += 1

    def run_slot(self, slot):
        """Run the actions of half a tick by the weights of its beginning, then the updates."""
        last = self.J - 1
        self.weights.append(
            [{n: p.detach().clone() for n, p in inner(u).named_parameters()} for u in self.units]
        )
        for j in range(self.J):
            n = self.microbatch(slot - self.up[j])
            if n is not None:
                x = self.batches[n][0] if j == 0 else self.outputs[n, j - 1]
                weights = self.look_ahead(j, n) if self.lookahead else self.weights[-1]
                for u in self.stages[j]:
                    self.inputs[n, u], self.used[n, u] = x, weights[u]
                    x = run_unit(self.units[u], weights[u], x)
                self.outputs[n, j] = _detach(x)
                if j == last:
                    leaves = _leaves(x)
                    loss = self.loss(leaves, self.batches[n][1])
                    self.losses.append(loss.item())
                    self.back[n, j] = (_detach(x), _grad(loss, _tuple(leaves)))
                    self.take_back(j, n)
        for j in range(last):
            n = self.microbatch(slot - (2 * self.up[-1] - self.up[j]) - 1)
            if n is not None:
                self.take_back(j, n)
        for j in range(self.J):
            if self.counts[j] == self.k:
                self.update(j)

    def microbatch(self, slots):
        """Return the micro-batch that entered so many slots after the first one, if any."""
        return slots // 2 if slots % 2 == 0 and 0 <= slots // 2 < len(self.batches) else None

    def look_ahead(self, j, n):
        """Return weights moved on by the last displacement, once per update before the backward."""
        if self.lookahead == "lead":
            return self.weights[-1]
        earlier = sum((m, j - 1) not in self.back for m in range(n))  # they come back before it
        num = (self.counts[j] + earlier) // self.k if j in self.optimizers else 0
        return {
            u: {
                n: (p + num * (p - self.before[j].get((u, n), p))).detach()
                for n, p in inner(self.units[u]).named_parameters()
            }
            for u in self.stages[j]
        }

    def take_back(self, j, n):
        value, grads = self.back[n, j]
        for u in reversed(self.stages[j]):
            unit = self.units[u]
            then = self.used[n, u]
            weights = self.weights[-1][u] if self.gradient_by == "now" else then
            x = self.inputs[n, u]
            if isinstance(unit, rd.Coupling) and self.inverse_by is not None:
                c, a = value
                inverse = self.weights[-1][u] if self.inverse_by == "now" else then
                x = (a, c - functional_call(unit.f, inverse, (a,)).detach())
            leaves, named = _leaves(x), {k: w.clone().requires_grad_() for k, w in weights.items()}
            y = _tuple(run_unit(unit, named, leaves))
            wanted = [*[leaf for leaf in _tuple(leaves) if leaf.requires_grad], *named.values()]
            grads = torch.autograd.grad(y, wanted, grads, allow_unused=True, materialize_grads=True)
            num_inputs = len(wanted) - len(named)
            grads, own = grads[:num_inputs], grads[num_inputs:]
            for name, grad in zip(named, own, strict=True):
                self.sums[j][u, name] = self.sums[j][u, name] + grad
                self.gradients.append((n, u, name, grad))
            value = _detach(x)
        self.back[n, j - 1] = (value, grads)
        self.counts[j] += 1

    def update(self, j):
        for (u, name), total in self.sums[j].items():
            inner(self.units[u]).get_parameter(name).grad = total / self.counts[j]
        self.before[j] = {
            (u, name): param.detach().clone()
            for u in self.stages[j]
            for name, param in inner(self.units[u]).named_parameters()
        }
        if j in self.optimizers:
            factor = self.lr_lambda(self.updates[j])
            for group, rate in zip(self.optimizers[j].param_groups, self.rates[j], strict=True):
                group["lr"] = rate * factor
            self.optimizers[j].step()
        if self.lookahead == "lead":
            self.lead(j)
        self.sums[j].clear()
        self.counts[j] = 0
        self.updates[j] += 1

    def lead(self, j):
        """Let an update go further by what it is longer than the last one, by its delay."""
        late = (self.up[-1] - self.up[j]) / self.k
        factor = late + min(late, 1) if late <= 2 else late
        for (u, name), before in self.before[j].items():
            param = inner(self.units[u]).get_parameter(name)
            moved = param.detach() - before
            last = self.moved.setdefault((u, name), moved)
            param.data += factor * (moved - last)
            self.moved[u, name] = moved

    def flush(self):
        while self.t < len(self.batches) + self.up[-1]:
            self.tick()
        self.reset()

    def parameters(self):
        return {
            f"{u}.{n}": p for u, unit in enumerate(self.units) for n, p in unit.named_parameters()
        }


def inner(unit):
    """Return the module that holds the parameters of a unit."""
    return unit.f if isinstance(unit, rd.Coupling) else unit


def run_unit(unit, weights, x):
    """Run a unit with these weights instead of its own."""
    if isinstance(unit, rd.Coupling):
        a, b = x
        return b + functional_call(unit.f, weights, (a,)), a
    return functional_call(unit, weights, (x,))


def _tuple(x):
    return x if isinstance(x, tuple) else (x,)


def _detach(x):
    return tuple(stream.detach() for stream in x) if isinstance(x, tuple) else x.detach()


def _leaves(x):
    if isinstance(x, tuple):
        return tuple(_leaves(stream) for stream in x)
    return x.detach().clone().requires_grad_(x.is_floating_point())


def _grad(loss, leaves):
    return torch.autograd.grad(loss, leaves)
