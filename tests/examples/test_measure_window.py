"""Measuring from the command line, and a training run that uses what was measured."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from cast_rl.window import StructureProfile

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(script: str, *overrides: str, expect: int = 0) -> str:
    command = [sys.executable, str(EXAMPLES / script), *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == expect, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


@pytest.mark.slow
def test_a_training_run_finds_what_was_measured(tmp_path):
    cache = tmp_path / "cache"
    shared = ("prompts.measured=12", f"measured.cache={cache}", "rollout.steps=5")
    picture = tmp_path / "picture.png"
    out = run("measure_window.py", *shared, f"picture={picture}", f"hydra.run.dir={tmp_path / 'measured'}")
    assert "settles at" in out and "windows of 2 steps start at step 0" in out
    with Image.open(picture) as drawn:
        assert min(drawn.size) > 400
    (kept,) = cache.rglob("*.safetensors")
    written = kept.stat().st_mtime_ns

    training = ("iterations=1", "prompts.train=8", "prompts.held_out=4", "model.steps=5", "log.pictures=0")
    training += ("rollout.prompts_per_iteration=2", "rollout.group_size=3", "optim.batch_size=6")
    run("train_cast.py", "window=measured", *shared, *training, f"hydra.run.dir={tmp_path / 'trained'}")
    assert (tmp_path / "trained" / "held_out.json").exists()
    assert [path.stat().st_mtime_ns for path in cache.rglob("*.safetensors")] == [written]
    first, second = (StructureProfile.load(tmp_path / name / "structure.json") for name in ("measured", "trained"))
    assert first.key == second.key == kept.parent.name
    assert json.loads((tmp_path / "trained" / "structure.json").read_text())["depends"]["steps"] == 5
