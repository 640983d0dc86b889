"""An optimizer step that survives a bad batch and says how large its gradients were."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from tensordict import TensorDictBase
from torch import Tensor


@dataclass
class StepReport:
    """What one step did.

    Args:
        stepped: whether the weights were updated.
        grad_norm: norm of all gradients before clipping; not finite if the step was skipped for it.
        grad_rms: root mean square of the gradients' elements as the optimizer saw them, after clipping.
        skipped: number of steps skipped so far.
    """

    stepped: bool
    grad_norm: float
    grad_rms: float
    skipped: int

    def gradients(self) -> dict[str, float]:
        """``grad_norm`` and ``grad_rms``, for a log."""
        return {"grad_norm": self.grad_norm, "grad_rms": self.grad_rms}


class GuardedStep:
    """Clips gradients and steps the optimizer, unless the loss or a gradient is not finite.

    Such a step is skipped and counted, its gradients are dropped, and the optimizer's state stays as it was.
    When several processes train one model, all of them skip if one has to.

    A warning is given, once, when the gradients' root mean square comes within a factor of ten of Adam's
    ``eps``: its updates then shrink with the gradients instead of being normalised by them.

    Args:
        optimizer: any torch optimizer; ``backward`` is the caller's.
        max_norm: bound on the gradients' norm.
        max_bad_steps: how many skipped steps in a row are an error.

    Attributes:
        skipped: number of steps skipped.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, max_norm: float = 1.0, max_bad_steps: int = 5):
        if max_norm <= 0 or max_bad_steps < 1:
            raise ValueError(f"max_norm={max_norm} must be positive and max_bad_steps={max_bad_steps} at least 1")
        self.optimizer, self.max_norm, self.max_bad_steps = optimizer, max_norm, max_bad_steps
        self.skipped = 0
        self._in_a_row = 0
        self._warned = False

    def step(self, loss: Tensor | float) -> StepReport:
        """One step on the gradients that ``loss.backward()`` left; they are cleared afterwards.

        Raises:
            RuntimeError: if there is no gradient at all, or after ``max_bad_steps`` skipped steps in a row.
        """
        parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not parameters:
            raise RuntimeError(
                "no parameter of the optimizer has a gradient; call backward() first, on a loss of its model"
            )
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.max_norm)
        # Sharded parameters have a sharded norm.
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        good = _on_all_ranks(norm.isfinite() & torch.as_tensor(loss, device=norm.device).detach().isfinite().all())
        grad_norm = float(norm)
        if not good:
            return self._skip(grad_norm, float(torch.as_tensor(loss).detach().float().mean()))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._in_a_row = 0
        grad_rms = min(grad_norm, self.max_norm) / sum(p.numel() for p in parameters) ** 0.5
        self._warn_about_eps(grad_rms)
        return StepReport(True, grad_norm, grad_rms, self.skipped)

    def _skip(self, grad_norm: float, loss: float) -> StepReport:
        self.optimizer.zero_grad()
        self.skipped += 1
        self._in_a_row += 1
        if self._in_a_row >= self.max_bad_steps:
            raise RuntimeError(
                f"{self._in_a_row} steps in a row had a loss or gradients that are not finite "
                f"(last loss {loss}, gradient norm {grad_norm}); {self.skipped} were skipped in all. Look at "
                "the scores and the learning rate, or resume from an earlier checkpoint"
            )
        return StepReport(False, grad_norm, float("nan"), self.skipped)

    def _warn_about_eps(self, grad_rms: float) -> None:
        eps = self.optimizer.param_groups[0].get("eps")
        if eps is not None and 0 < grad_rms < 10 * eps and not self._warned:
            self._warned = True
            warnings.warn(
                f"gradients have a root mean square of {grad_rms:.2e}, close to the optimizer's "
                f"eps={eps:.0e}: Adam is running on eps and takes smaller steps than its learning rate says; "
                "scale the loss up or lower eps",
                stacklevel=3,
            )


def backward_in_parts(
    loss_module: Callable[[TensorDictBase], TensorDictBase], batch: TensorDictBase, part_size: int | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Backward passes through `part_size` rows of the batch at a time, whose gradients add up to the batch's.

    Memory is that of one part, the gradient that of the mean over all rows: parts count by their rows. With a loss that
    leaves rows out (a mask) the mean is over parts first, and differs if they leave out unequally many.

    Args:
        loss_module: from a batch to terms; those whose names begin with ``loss_`` are summed.
        batch: ``(N,)``.
        part_size: None for the whole batch at once.

    Returns:
        The loss, detached, and all terms: means over rows, or the maximum if the name begins with ``max_``.

    Raises:
        ValueError: a part size below 1.
    """
    if part_size is not None and part_size < 1:
        raise ValueError(f"part_size must be at least 1, or None for the whole batch; got {part_size}")
    shares: list[float] = []
    parts: list[dict[str, Tensor]] = []
    for part in batch.split(part_size or len(batch)):
        terms = dict(loss_module(part).items())
        share = len(part) / len(batch)
        loss = share * sum(value for name, value in terms.items() if name.startswith("loss_"))
        loss.backward()
        shares.append(share)
        parts.append({name: value.detach() for name, value in terms.items()})
    joined = {}
    for name in parts[0]:
        values = torch.stack([terms[name] for terms in parts])
        weights = torch.tensor(shares, dtype=values.dtype, device=values.device)
        joined[name] = values.amax(0) if name.startswith("max_") else (weights * values).sum()
    return sum(value for name, value in joined.items() if name.startswith("loss_")), joined


def _on_all_ranks(good: Tensor) -> bool:
    """Whether every process of the default group says yes; just this one where there is no group."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        flag = good.to(torch.int32)
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MIN)
        return bool(flag)
    return bool(good)
