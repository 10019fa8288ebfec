"""Muon: orthogonalised momentum for matrices, AdamW or SGD for all other parameters.

    momentum     m <- momentum m + (1 - momentum) g
                 u  = momentum m + (1 - momentum) g      (Nesterov; else u = m)
    step         w <- (1 - lr decay) w - lr scale X      X close to U V^T, where u = U S V^T

All directions of X have the same length, so steep ones do not set the rate of the others. That is
why Muon bears gradients that come late (docs/trade-offs.md). Jordan et al. 2024; the scale
"match_rms_adamw" is of Liu et al. 2025.
"""

from collections.abc import Callable, Iterable, Sequence
from math import inf, sqrt
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim.adam import adam
from torch.optim.sgd import sgd

# Five steps of the iteration bring singular values from 0.002 to 1 into 0.68 to 1.21.
NUM_STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
SMALLEST = 1e-7  # norm below which a gradient counts as zero
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
# Layers whose 2-D parameters are not matrices, but tables, gains, or parts of a weight.
NO_MATRICES = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm, ParametrizationList)
SCALES: dict[str, Callable[[int, int], float]] = {
    "match_rms_adamw": lambda rows, columns: 0.2 * sqrt(max(rows, columns)),
    "spectral": lambda rows, columns: sqrt(max(1.0, rows / columns)),
}
SETTINGS = ("momentum", "nesterov", "weight_decay", "scale")  # of a group, for `muon`
RESTS: dict[str, dict[str, Any]] = {
    "adamw": {"betas": (0.9, 0.999), "eps": 1e-8, "capturable": False},
    "sgd": {"momentum": 0.9, "nesterov": True},
}


class Muon(torch.optim.Optimizer):
    """Optimizer whose steps of matrices are orthogonal.

        optimizer = rd.Muon(model, lr=0.002)
        pipe = rd.Pipeline(model, ..., optimizer=lambda stage: rd.Muon(stage, lr=0.002))

    Matrices, and filters of convolutions as matrices of out x (in height width), take a step by
    their orthogonalised momentum. Everything else is the rest: vectors, embeddings, filters that
    are depthwise or transposed, what `exclude` names, and modules whose attribute `orthogonalise`
    is False, such as stem and head of our own models. A table that is a bare parameter looks like a
    matrix: exclude it. Weight decay is decoupled from gradients everywhere.

    Args:
        module: Module to train, such as a model or a stage of a pipeline.
        lr: Learning rate.
        momentum: Share of the old momentum in a step.
        nesterov: Whether the gradient counts once more, beside the momentum.
        weight_decay: Decay of the weights in a step, times the learning rate.
        scale: Length of a step of m x n: "match_rms_adamw" for 0.2 sqrt(max(m, n)), with which
            rates of AdamW carry over, or "spectral" for sqrt(max(1, m / n)), for convolutions.
        rest: Optimizer of the rest: "adamw", or "sgd" with a Nesterov momentum of 0.9. Its options
            are in the second of the `param_groups`.
        rest_lr: Learning rate of the rest; `lr` by default.
        exclude: Names of modules or parameters that belong to the rest.
    """

    found_inf: Tensor | None = None
    """Flag on the device, as of torch's fused optimizers: where it is set, a step does nothing."""

    def __init__(
        self,
        module: nn.Module,
        lr: float | Tensor,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        scale: Literal["match_rms_adamw", "spectral"] = "match_rms_adamw",
        rest: Literal["adamw", "sgd"] = "adamw",
        rest_lr: float | Tensor | None = None,
        exclude: Iterable[str] = (),
    ) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(
                "Muon takes a module, whose layers tell what is a matrix, such as "
                f"rd.Muon(model, lr=0.002), got {type(module).__name__}"
            )
        if rest_lr is None:
            rest_lr = lr.clone() if isinstance(lr, Tensor) else lr
        for name, number in (("lr", lr), ("rest_lr", rest_lr), ("weight_decay", weight_decay)):
            _verify_number(name, number)
        _verify_number("momentum", momentum, below=1.0)
        for name, choice, known in (("scale", scale, SCALES), ("rest", rest, RESTS)):
            if choice not in known:
                choices = " or ".join(map(repr, known))
                raise ValueError(f"{name} must be {choices}, got {choice!r}")
        matrices, others = split_parameters(module, exclude)
        by_muon = {
            "kind": "muon",
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "scale": scale,
            "fused": True,  # it reads its rate, and skips a step after a fault, on the device
        }
        by_rest = {"kind": rest, "lr": rest_lr, "weight_decay": weight_decay, **RESTS[rest]}
        # Fused kernels count their steps on the GPU, so that graphs can be captured.
        by_rest |= {"fused": _can_fuse([*matrices, *others]) or None, "foreach": None}
        settings = {"muon": by_muon, rest: by_rest}
        params = {"muon": matrices, rest: others}
        groups = [{"params": params[kind], "kind": kind} for kind in settings]
        super().__init__(groups, {"kind": rest, "settings": settings})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, which belong to the rest unless the group has `kind="muon"`."""
        settings, kind = self.defaults["settings"], param_group.get("kind", self.defaults["kind"])
        if kind not in settings:
            known = " or ".join(map(repr, settings))
            raise ValueError(f"kind of a group must be {known}, got {kind!r}")
        super().add_param_group({**settings[kind], **param_group})
        del self.param_groups[-1]["settings"]  # torch adds all defaults
        for param in self.param_groups[-1]["params"]:
            if hasattr(param, "full_tensor"):  # a DTensor
                raise TypeError(
                    "Muon orthogonalises whole matrices, and these are sharded over processes "
                    "(FSDP); use rd.DistributedPipeline, whose stages have their weights whole, or "
                    "another optimizer"
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None and p.numel()]
            if params:
                run = {"muon": self._step_muon, "adamw": self._step_adamw, "sgd": self._step_sgd}
                run[group["kind"]](group, params, [param.grad for param in params])
        return loss

    def _step_muon(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        settings = {name: group[name] for name in SETTINGS}
        moments = self._state(params, "momentum_buffer")
        muon(params, grads, moments, rate=group["lr"], found_inf=self.found_inf, **settings)

    def _step_adamw(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        if group["fused"] is None and group["foreach"] is None and _can_fuse(params):
            group["fused"] = True  # the model has been moved to a GPU since
        on_device = bool(group["capturable"] or group["fused"])
        for param in params:
            state = self.state[param]
            device = param.device if on_device else torch.device("cpu")
            state["step"] = state.get("step", torch.zeros(())).to(device)
        beta1, beta2 = group["betas"]
        run: Any = adam  # of which torch declares fewer arguments
        run(
            params,
            grads,
            self._state(params, "exp_avg"),
            self._state(params, "exp_avg_sq"),
            [],
            [self.state[param]["step"] for param in params],
            foreach=group["foreach"],
            capturable=group["capturable"],
            differentiable=False,
            fused=group["fused"],
            found_inf=self.found_inf if group["fused"] else None,
            decoupled_weight_decay=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _step_sgd(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        rate = group["lr"]
        if group["weight_decay"]:
            decay = rate * group["weight_decay"]
            if self.found_inf is not None:
                decay = decay * (self.found_inf == 0)
            torch._foreach_mul_(params, 1 - decay)
        moments = [self.state[param].get("momentum_buffer") for param in params]
        is_known = [moment is not None for moment in moments]
        # The kernel fails on a group where only some parameters have a momentum.
        fused = group["fused"] and (all(is_known) or not any(is_known))
        sgd(
            params,
            grads,
            moments,
            foreach=group["foreach"],
            fused=fused,
            found_inf=self.found_inf if fused else None,
            weight_decay=0.0,
            momentum=group["momentum"],
            lr=rate,
            dampening=0.0,
            nesterov=group["nesterov"],
            maximize=False,
        )
        for param, moment in zip(params, moments, strict=True):
            self.state[param]["momentum_buffer"] = moment

    def _state(self, params: Sequence[Tensor], name: str) -> list[Tensor]:
        """Return a tensor of the state of every parameter, zeros at first."""
        for param in params:
            if name not in self.state[param]:
                self.state[param][name] = torch.zeros_like(param)
        return [self.state[param][name] for param in params]


def muon(
    params: list[Tensor],
    grads: list[Tensor],
    moments: list[Tensor],
    *,
    rate: float | Tensor,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
    scale: str,
    found_inf: Tensor | None = None,
) -> None:
    """Update matrices and their momenta; matrices of one shape are orthogonalised as one batch."""
    if found_inf is not None:
        is_sound = found_inf == 0
        rate = torch.where(is_sound, rate, 0.0)
        pairs = zip(grads, moments, strict=True)
        grads = [torch.where(is_sound, grad, moment) for grad, moment in pairs]
    torch._foreach_lerp_(moments, grads, 1 - momentum)
    steps = torch._foreach_lerp(grads, moments, momentum) if nesterov else moments
    if weight_decay:
        torch._foreach_mul_(params, 1 - rate * weight_decay)
    alike: dict[Any, list[tuple[Tensor, Tensor]]] = {}
    for param, step in zip(params, steps, strict=True):
        matrix = step.permute(memory_order(param)).flatten(1)
        key = (matrix.shape, matrix.dtype, matrix.device)
        alike.setdefault(key, []).append((param, matrix))
    for (shape, _, _), members in alike.items():
        batch = orthogonalise(torch.stack([matrix for _, matrix in members]))
        batch = batch.to(members[0][1].dtype).mul_(rate * SCALES[scale](*shape))
        # Views in the order of memory, so that nothing is copied.
        weights = [param.permute(memory_order(param)) for param, _ in members]
        updates = [step.view(weight.shape) for step, weight in zip(batch, weights, strict=True)]
        torch._foreach_sub_(weights, updates)


def memory_order(param: Tensor) -> list[int]:
    """Return the dimensions in the order of memory, rows first.

    Columns of a matrix may have any order. That of memory spares filters in channels_last a copy.
    """
    return [0, *sorted(range(1, param.ndim), key=param.stride, reverse=True)]


def orthogonalise(matrices: Tensor) -> Tensor:
    """Return the nearest semi-orthogonal matrices of a batch, by five steps of Newton and Schulz.

    A zero matrix stays zero. In bf16 on a GPU; on the CPU, which may emulate bf16, in float32, or
    in float64 where the matrices are.
    """
    wide = matrices.to(torch.promote_types(matrices.dtype, torch.float32))  # norms may be large
    norms = torch.linalg.matrix_norm(wide, keepdim=True).clamp(min=SMALLEST)
    x: Tensor = (wide / norms).to(torch.bfloat16 if wide.is_cuda else wide.dtype)
    is_tall = x.size(-2) > x.size(-1)
    x = x.mT if is_tall else x  # products of the short side
    a, b, c = COEFFICIENTS
    for _ in range(NUM_STEPS):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if is_tall else x


def split_parameters(
    module: nn.Module, exclude: Iterable[str] = ()
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the parameters of a module that are matrices to orthogonalise, and all others.

    Args:
        module: The module.
        exclude: Names of modules or parameters that are not to be orthogonalised.
    """
    names = [exclude] if isinstance(exclude, str) else list(exclude)
    layers = dict(module.named_modules(remove_duplicate=False))
    outside = [name for name, layer in layers.items() if not getattr(layer, "orthogonalise", True)]
    is_matrix: dict[nn.Parameter, bool] = {}
    unmatched = set(names)
    for name, layer in layers.items():
        for key, param in layer.named_parameters(recurse=False):
            full = f"{name}.{key}" if name else key
            matched = {prefix for prefix in names if _is_inside(full, prefix)}
            unmatched -= matched
            is_outside = bool(matched) or any(_is_inside(full, prefix) for prefix in outside)
            # A shared parameter is a matrix if it is one in all places.
            is_matrix[param] = (
                is_matrix.get(param, True) and not is_outside and _is_matrix(layer, key, param)
            )
    if unmatched and type(module) is not nn.Module:  # as that of a stage, which is but a part
        raise ValueError(f"exclude names {min(unmatched)!r}, and {type(module).__name__} has none")
    matrices = [param for param, orthogonal in is_matrix.items() if orthogonal]
    return matrices, [param for param, orthogonal in is_matrix.items() if not orthogonal]


def _verify_number(name: str, number: Any, below: float = inf) -> None:
    if not isinstance(number, Real | Tensor) or not 0 <= float(number) < below:
        bound = "" if below == inf else f" and below {below:g}"
        raise ValueError(f"{name} must be a number, at least 0{bound}, got {number!r}")


def _is_inside(name: str, prefix: str) -> bool:
    return prefix in ("", name) or name.startswith(f"{prefix}.")


def _is_matrix(layer: nn.Module, key: str, param: Tensor) -> bool:
    """Return whether a parameter of a layer multiplies vectors, as a matrix or as a filter."""
    if isinstance(layer, NO_MATRICES) or key.endswith("bias") or param.is_complex():
        return False
    if isinstance(layer, CONVOLUTIONS):
        return param.ndim > 2 and not (layer.groups > 1 and layer.groups == layer.in_channels)
    return param.ndim == 2


def _can_fuse(params: Iterable[Tensor]) -> bool:
    """Return whether fused kernels on a GPU can train these parameters."""
    return all(param.is_cuda and not param.is_complex() for param in params)
