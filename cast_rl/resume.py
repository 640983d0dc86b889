"""Going on with a run that was killed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torchrl.checkpoint import Checkpoint

from cast_rl.backbones.base import Backbone
from cast_rl.fingerprint import weights_fingerprint
from cast_rl.judges import Judge
from cast_rl.window.key import identify_judge
from cast_rl.window.profile import digest


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings as dotted keys: ``{"optim": {"lr": 1}}`` gives ``("optim.lr", 1)``."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def started_from(backbone: Backbone, judge: Judge) -> dict[str, str]:
    """What a run's settings do not say: digests of the weights before training and of the judge, as settings.

    A checkpoint holds only what is trained, so that going on with other weights beneath it must be refused.
    """
    return {"weights_before": weights_fingerprint(backbone.transformer), "judged_by": digest(identify_judge(judge))}


def resume(
    checkpoint: Checkpoint,
    path: Path,
    state: dict[str, Any],
    *,
    device: torch.device | str = "cpu",
    may_differ: Sequence[str] = (),
) -> bool:
    """Load ``path`` into the checkpoint's components, if a run left it there.

    Args:
        checkpoint: with ``state``, among others, as a component.
        path: where it was saved. A save that was killed between its two renames is found, too.
        state: ``state["config"]`` holds this run's settings; those of the saved run must be the same.
        device: where the saved tensors go.
        may_differ: settings, or groups of them, that may have changed.

    Returns:
        Whether there was anything to load.

    Raises:
        ValueError: the saved run had other settings, each named with both values.
    """
    backups = sorted(path.parent.glob(f".{path.name}.backup-*"), key=lambda p: p.stat().st_mtime)
    if not path.exists() and backups:
        backups[-1].rename(path)
    if not path.exists():
        return False
    ours = dict(flatten(state["config"]))
    checkpoint.load(path, map_location=device)
    theirs = dict(flatten(state["config"]))
    changed = [
        f"{key} was {theirs.get(key)!r} and is {ours.get(key)!r}"
        for key in sorted(ours | theirs)
        if ours.get(key) != theirs.get(key) and not any(f"{key}.".startswith(f"{free}.") for free in may_differ)
    ]
    if changed:
        raise ValueError(
            f"the run in {path.parent} had other settings: {'; '.join(changed)}. Give it the overrides it was started "
            "with, or start a new run in another folder"
        )
    return True
