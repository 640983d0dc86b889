"""SDE windows: samplers of them, and the profile of a model from which the early ones are found.

Measuring a profile is in `cast_rl.window.measure`, drawing it in `cast_rl.window.draw`; both load more than these do.
"""

from cast_rl.window.profile import Criterion, StructureProfile
from cast_rl.window.samplers import FixedWindow, SlidingWindow, UniformWindow, WindowSampler, check_windows

__all__ = [
    "Criterion",
    "FixedWindow",
    "SlidingWindow",
    "StructureProfile",
    "UniformWindow",
    "WindowSampler",
    "check_windows",
]
