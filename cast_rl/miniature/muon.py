"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon), batched over equal shapes and in float32.

``torch.optim.Muon`` orthogonalises one matrix at a time in bfloat16, which CPUs without bfloat16 units compute some
hundred times more slowly than float32; for matrices this small, one batch per shape is also faster.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def orthogonalise(x: Tensor, steps: int = 5) -> Tensor:
    """Move the singular values of every matrix of ``x (N, rows, columns)``, rows <= columns, to about 1.

    Quintic Newton-Schulz iteration with Muon's coefficients; singular values end in roughly [0.7, 1.2].
    """
    x = x / (x.flatten(1).norm(dim=1)[:, None, None] + 1e-7)
    for _ in range(steps):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


class BatchedMuon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised, with the update's RMS matched to AdamW's (factor 0.2 sqrt(max(shape))).

    Args:
        params: matrices only.
        lr: the learning rate, on AdamW's scale.
        momentum: of the gradient's running sum.
        weight_decay: decoupled.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        for group in self.param_groups:
            if any(p.ndim != 2 for p in group["params"]):
                raise ValueError("Muon optimises matrices; give vectors and scalars to another optimiser")

    @torch.no_grad()
    def step(self, closure=None):
        """One update; parameters without a gradient are left alone."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            shapes: dict[tuple[int, int], list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    shapes.setdefault(tuple(sorted(p.shape)), []).append(p)
            for shape, params in shapes.items():
                self._update(params, max(shape), **{k: group[k] for k in ("lr", "momentum", "weight_decay")})
        return loss

    def _update(self, params: list[Tensor], long_side: int, lr: float, momentum: float, weight_decay: float) -> None:
        direction = []
        for p in params:
            sum_ = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
            sum_.mul_(momentum).add_(p.grad)
            d = p.grad.add(sum_, alpha=momentum)
            direction.append(d if d.shape[0] <= d.shape[1] else d.T)
        update = orthogonalise(torch.stack(direction)) * (0.2 * long_side**0.5)
        for p, u in zip(params, update, strict=True):
            p.mul_(1 - lr * weight_decay).sub_(u if p.shape[0] <= p.shape[1] else u.T, alpha=lr)
