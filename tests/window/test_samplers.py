from collections import Counter

import pytest
import torch
from omegaconf import OmegaConf

from cast_rl.window import FixedWindow, SlidingWindow, UniformWindow, WindowSampler, check_windows

SIGMAS = torch.cat([torch.linspace(1, 0.02, 10), torch.zeros(1)])


def test_uniform_windows_cover_their_starts_evenly():
    window = UniformWindow(first=1, last=4, width=2)
    assert isinstance(window, WindowSampler)
    draws = Counter(window(0, iteration, group) for iteration in range(50) for group in range(20))
    assert sorted(draws) == list(window.starts) == [1, 2, 3, 4]
    assert all(200 < count < 300 for count in draws.values())
    assert window(0, 3, 5) == window(0, 3, 5)
    assert [window(0, 0, g) for g in range(16)] != [window(1, 0, g) for g in range(16)]


def test_fixed_window():
    window = FixedWindow(start=2, width=3)
    assert isinstance(window, WindowSampler)
    assert list(window.starts) == [2]
    assert window(0, 9, 9) == 2


def test_a_range_without_a_start_is_refused():
    with pytest.raises(ValueError, match="first=4, last=3"):
        UniformWindow(4, 3, 1)


@pytest.mark.parametrize(
    ("start", "width", "message"),
    [
        (0, 0, "width 0"),
        (8, 3, "8 to 10 leaves the schedule"),
        (-1, 2, "-1 to 0 leaves"),
        (9, 1, "must not take"),
    ],
)
def test_windows_that_cannot_work_are_named(start, width, message):
    with pytest.raises(ValueError, match=message):
        check_windows(SIGMAS, [1, start], width, transition="cps", a=0.5)


def test_the_gate_is_the_noise_left_and_not_the_last_step():
    with pytest.raises(ValueError, match=r"steps 7 to 8 .* flow_sde with a=0.9 .*Usable are \[0, 1, 2"):
        check_windows(SIGMAS, [7], 2, transition="flow_sde", a=0.9)
    check_windows(SIGMAS, [7], 2, transition="cps", a=0.9)
    check_windows(SIGMAS, range(6), 2, transition="flow_sde", a=0.9)


@pytest.mark.parametrize(("transition", "a"), [("ode", 0.7), ("flow_sde", 0.0)])
def test_without_noise_any_window_in_the_schedule_will_do(transition, a):
    check_windows(SIGMAS, [0], 10, transition=transition, a=a)


def test_a_sliding_window_goes_through_its_starts_with_the_iterations():
    window = SlidingWindow(first=1, last=3, width=2, every=2)
    assert isinstance(window, WindowSampler)
    assert list(window.starts) == [1, 2, 3]
    assert [window(5, iteration, group) for iteration in range(8) for group in (0, 9)] == [
        *[1] * 4, *[2] * 4, *[3] * 4, *[1] * 4
    ]  # fmt: skip
    with pytest.raises(ValueError, match="SlidingWindow.first=4, last=3"):
        SlidingWindow(4, 3, 1)
    with pytest.raises(ValueError, match="every=0"):
        SlidingWindow(1, 3, 1, 0)


def test_a_window_set_by_hand_is_two_whole_numbers():
    assert FixedWindow.between([1, 3]) == FixedWindow.between(OmegaConf.create([1, 3])) == FixedWindow(1, 2)
    for wrong in ([3, 1], [1, 1], [-1, 2], [1, 2, 3], [0.5, 2], [False, True], "measurd", 3, None):
        with pytest.raises(ValueError, match="is no window"):
            FixedWindow.between(wrong)
