"""Layers of transformers as the papers write them, by the names of a state dict."""

import torch
import torch.nn.functional as F

import redivider as rd


def unsettled(name, **options):
    """Return a model in evaluation mode, all weights and buffers changed from their first value."""
    model = rd.create_model(name, dtype=torch.float64, **options)
    torch.manual_seed(0)
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                tensor.add_(
                    torch.rand_like(tensor) if "var" in key else torch.randn_like(tensor) / 4
                )
    return model.eval()


def layer_norm(state, key, x, eps):
    return F.layer_norm(x, x.shape[-1:], state[f"{key}.weight"], state[f"{key}.bias"], eps)


def linear(state, key, x):
    return x @ state[f"{key}.weight"].T + state[f"{key}.bias"]


def mlp(state, key, x, eps, approximate):
    x = linear(state, f"{key}.body.grow", layer_norm(state, f"{key}.norm", x, eps))
    return linear(state, f"{key}.body.shrink", F.gelu(x, approximate=approximate))


def explicit_attention(q, k, v, bias=None, causal=False):
    """Return softmax(q k^T) v, with all logits in memory."""
    logits = q @ k.mT / q.shape[-1] ** 0.5
    if bias is not None:
        logits = logits + bias
    if causal:
        logits = logits.masked_fill(~torch.ones_like(logits).tril().bool(), float("-inf"))
    return logits.softmax(-1) @ v
