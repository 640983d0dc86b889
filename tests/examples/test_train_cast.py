"""The recipe from its command line: what it prints, logs, draws and saves."""

import csv
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image

from cast_rl.miniature import GENERATOR
from cast_rl.miniature.quality import generate

SCRIPT = Path(__file__).parents[2] / "examples" / "train_cast.py"
SMALL = [
    "iterations=2",
    "prompts.train=20",
    "prompts.held_out=8",
    "rollout.prompts_per_iteration=2",
    "rollout.group_size=4",
    "optim.batch_size=8",
    "log.pictures=4",
]


def train(folder: Path, *overrides: str, expect: int = 0) -> str:
    command = [sys.executable, str(SCRIPT), *SMALL, f"hydra.run.dir={folder}", *overrides]
    done = subprocess.run(command, capture_output=True, text=True, env=None, timeout=300)
    assert done.returncode == expect, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


@pytest.mark.slow
def test_lora_run_leaves_figures_pictures_logs_and_a_loadable_lora(tmp_path):
    out = train(
        tmp_path,
        "model.lora={rank: 4, alpha: 8}",
        "optim.learning_rate=0.01",
        "loss.kl_coeff=0.1",
    )
    assert "held-out" in out and "atom_score" in out
    report = json.loads((tmp_path / "held_out.json").read_text())
    assert set(report) == {"before", "after", "gain"} and 0 <= report["after"]["all_correct"] <= 1
    gain = report["after"]["atom_score"] - report["before"]["atom_score"]
    assert report["gain"]["atom_score"] == pytest.approx(gain, abs=1e-6)
    for name in ("before_after.png", "reward.png"):
        assert min(Image.open(tmp_path / name).size) > 200
    names = {path.stem for path in tmp_path.rglob("*.csv")}
    assert names >= {"max_abs_log_ratio", "max_ratio", "first_pass_log_ratio", "skipped", "grad_norm", "grad_rms"}
    (gap,) = {float(row[1]) < 1e-4 for row in csv.reader(next(tmp_path.rglob("first_pass_log_ratio.csv")).open())}
    assert gap, "the first pass over fresh data has a ratio of 1"
    rewards = list(csv.reader(next(tmp_path.rglob("mean_score.csv")).open()))
    assert len(rewards) == 2 and all(0 <= float(row[1]) <= 1 for row in rewards)

    pipe = DiffusionPipeline.from_pretrained(GENERATOR, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    plain = generate(pipe, ["two red circles"], seed=0)
    pipe.load_lora_weights(tmp_path / "lora")
    assert (generate(pipe, ["two red circles"], seed=0) - plain).abs().max() > 1e-3


@pytest.mark.slow
def test_flow_grpo_ablation_trains_all_weights_and_saves_a_pipeline(tmp_path):
    flow_grpo = ("loss.maps=none", "advantage=scalar", "loss.ratio=sample", "rollout.transition=dance_sde")
    train(tmp_path, *flow_grpo, "model.weights=null", "judge=oracle")
    before = DiffusionPipeline.from_pretrained(GENERATOR, torch_dtype=torch.float32).transformer.state_dict()
    after = DiffusionPipeline.from_pretrained(tmp_path / "pipeline").transformer.state_dict()
    still = [name for name in before if torch.equal(before[name], after[name])]
    # Nobody reads the text that the last block puts out.
    assert len(still) < len(before) / 5 and not [name for name in still if "transformer_blocks.3" not in name]
    assert all(v.isfinite().all() for v in after.values())


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_numbers(tmp_path):
    options = ("iterations=4", "checkpoint_every=1", "optim.learning_rate=1e-3")
    train(tmp_path / "whole", *options)
    command = [sys.executable, str(SCRIPT), *SMALL, *options, f"hydra.run.dir={tmp_path / 'killed'}"]
    started = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    saved = tmp_path / "killed" / "checkpoint"
    deadline = time.monotonic() + 240
    while not saved.exists() and started.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    started.kill()
    assert started.wait() == -9, "it ended before it could be killed"
    logged = next((tmp_path / "killed").rglob("mean_score.csv")).read_text().splitlines()
    with pytest.raises(AssertionError, match=r"optim.learning_rate was 0.001 and is 0.01"):
        train(tmp_path / "killed", *options, "optim.learning_rate=1e-2")
    assert "going on from iteration" in train(tmp_path / "killed", *options)
    rows = next((tmp_path / "killed").rglob("mean_score.csv")).read_text().splitlines()[len(logged) :]
    assert rows and not rows[0].startswith("0,"), "it began again"
    whole, resumed = (
        DiffusionPipeline.from_pretrained(tmp_path / name / "pipeline").transformer.state_dict()
        for name in ("whole", "killed")
    )
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert (tmp_path / "whole" / "held_out.json").read_text() == (tmp_path / "killed" / "held_out.json").read_text()


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("loss.clip_epsilonn=0.1", "clip_epsilonn"),
        ("model.lora={ranks: 4}", "ranks"),
        ("optim.batch_size=0", "optim.batch_size=0 must be a whole number of at least 1"),
    ],
)
def test_settings_that_cannot_be_meant_are_named(tmp_path, override, named):
    assert named in train(tmp_path, override, expect=1)
