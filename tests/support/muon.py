"""Muon straight from its equations, by singular values in float64."""

import torch

from redivider.optim.muon import COEFFICIENTS, NUM_STEPS, SCALES


def iterate(values):
    """Return what the iteration makes of singular values."""
    a, b, c = COEFFICIENTS
    for _ in range(NUM_STEPS):
        values = a * values + b * values**3 + c * values**5
    return values


def exact(matrix):
    """Return the orthogonalised matrix by singular values, in float64."""
    u, values, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    return u * iterate(values / matrix.double().norm()) @ v


class Oracle:
    """Muon as its equations say, one matrix after the other, in float64."""

    def __init__(self, weights, lr, momentum, nesterov, decay, scale):
        self.weights = [weight.detach().cpu().double().clone() for weight in weights]
        self.moments = [torch.zeros_like(weight) for weight in self.weights]
        self.lr, self.momentum, self.nesterov = lr, momentum, nesterov
        self.decay, self.scale = decay, scale

    def step(self, grads):
        b = self.momentum
        for i, grad in enumerate(grads):
            if grad is None:
                continue
            g = grad.cpu().double()
            self.moments[i] = b * self.moments[i] + (1 - b) * g
            step = b * self.moments[i] + (1 - b) * g if self.nesterov else self.moments[i]
            matrix = step.reshape(len(step), -1)
            length = self.lr * SCALES[self.scale](*matrix.shape)
            kept = (1 - self.lr * self.decay) * self.weights[i]
            self.weights[i] = kept - length * exact(matrix).reshape(step.shape)


def set_grads(params, seed):
    """Set random gradients, by a seed."""
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        # Steep in some directions and flat in others, as gradients are.
        grad = torch.randn(param.shape, generator=generator, dtype=torch.float64)
        grad *= torch.logspace(0, -1.5, param.shape[-1], dtype=torch.float64)
        param.grad = grad.to(param)
