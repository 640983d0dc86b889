"""SDE windows: which consecutive denoising steps of a group are stochastic."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from cast_rl.seeding import derive_seed
from cast_rl.transitions import Kind, check_kind, noise_left, usable_steps

WINDOW_STREAM = 2


@runtime_checkable
class WindowSampler(Protocol):
    """Draws the first stochastic step of a group.

    The draw is a pure function of its arguments, ``width`` the same for every group (batches stay
    rectangular), and ``starts`` holds every value that can be drawn, so that an environment can refuse bad
    ones before it runs.
    """

    width: int

    @property
    def starts(self) -> Sequence[int]: ...

    def __call__(self, seed: int, iteration: int, group: int) -> int: ...


@dataclass(frozen=True)
class FixedWindow:
    """The steps ``start, ..., start + width - 1`` for every group."""

    start: int
    width: int

    @property
    def starts(self) -> range:
        return range(self.start, self.start + 1)

    def __call__(self, seed: int, iteration: int, group: int) -> int:
        return self.start


@dataclass(frozen=True)
class UniformWindow:
    """``width`` steps whose first is uniform over ``first, ..., last`` (both included), drawn per group."""

    first: int
    last: int
    width: int

    def __post_init__(self):
        if self.last < self.first:
            raise ValueError(f"UniformWindow(first={self.first}, last={self.last}) has no start; last must be >= first")

    @property
    def starts(self) -> range:
        return range(self.first, self.last + 1)

    def __call__(self, seed: int, iteration: int, group: int) -> int:
        return self.first + derive_seed(seed, WINDOW_STREAM, iteration, group) % len(self.starts)


def check_windows(sigmas: Tensor, starts: Iterable[int], width: int, *, transition: Kind, a: float) -> None:
    """Refuses windows that leave the schedule, or hold a step where the transition must not inject noise.

    Args:
        sigmas: schedule, ``(steps + 1,)``.
        starts: first steps of the windows.
        width: their common number of steps.
        transition, a: see `cast_rl.transitions.usable_steps`. ``"ode"`` and ``a = 0`` inject none, so that
            any window inside the schedule will do.

    Raises:
        ValueError: naming the window, the usable steps and what to change.
    """
    check_kind(transition, a)
    steps = len(sigmas) - 1
    if width < 1:
        raise ValueError(f"an SDE window needs at least one step, got width {width}")
    silent = transition == "ode" or a == 0
    usable = usable_steps(transition, sigmas, a)
    for start in sorted(set(starts)):
        window = f"the window of steps {start} to {start + width - 1}"
        if start < 0 or start + width > steps:
            raise ValueError(f"{window} leaves the schedule, whose {steps} steps are 0 to {steps - 1}")
        if not silent and not usable[start : start + width].all():
            left = [round(value, 2) for value in noise_left(transition, sigmas, a).tolist()]
            raise ValueError(
                f"{window} holds steps that {transition} with a={a} must not take. Usable are "
                f"{usable.nonzero().flatten().tolist()}; the steps leave these multiples of the right noise: "
                f"{left}. Move the window, lower a, or use transition='cps'"
            )
