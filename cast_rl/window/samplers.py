"""SDE windows: which consecutive denoising steps of a group are stochastic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

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

    @classmethod
    def between(cls, bounds: Any) -> FixedWindow:
        """The window of a setting ``[start, stop]``: the steps from ``start`` to ``stop - 1``.

        Raises:
            ValueError: it is not two whole numbers with ``0 <= start < stop``.
        """
        given = list(bounds) if isinstance(bounds, Sequence) and not isinstance(bounds, str) else []
        whole = all(isinstance(value, int) and not isinstance(value, bool) for value in given)
        if len(given) != 2 or not whole or not 0 <= given[0] < given[1]:
            raise ValueError(
                f"window={bounds} is no window; give [start, stop], two whole numbers with 0 <= start < stop: the "
                "first stochastic step and the one after the last"
            )
        return cls(given[0], given[1] - given[0])

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
        _check_starts(self)

    @property
    def starts(self) -> range:
        return range(self.first, self.last + 1)

    def __call__(self, seed: int, iteration: int, group: int) -> int:
        return self.first + derive_seed(seed, WINDOW_STREAM, iteration, group) % len(self.starts)


@dataclass(frozen=True)
class SlidingWindow:
    """``width`` steps whose first moves from ``first`` to ``last``, one step every ``every`` iterations, and again.

    All groups of an iteration share it. After MixGRPO (arXiv 2507.21802), whose window goes through the whole schedule.
    """

    first: int
    last: int
    width: int
    every: int = 1

    def __post_init__(self):
        _check_starts(self)
        if self.every < 1:
            raise ValueError(f"SlidingWindow(every={self.every}) never moves; every must be at least 1 iteration")

    @property
    def starts(self) -> range:
        return range(self.first, self.last + 1)

    def __call__(self, seed: int, iteration: int, group: int) -> int:
        return self.first + iteration // self.every % len(self.starts)


def _check_starts(window: UniformWindow | SlidingWindow) -> None:
    if window.last < window.first:
        name = f"{type(window).__name__}(first={window.first}, last={window.last})"
        raise ValueError(f"{name} has no start; last must be >= first")


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
