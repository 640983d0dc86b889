"""F15: averaged weights that are swapped in are swapped back, and are not saved as if they were the raw ones."""

import json

import pytest
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import load_file
from torchrl.checkpoint import Checkpoint

from cast_rl.backbones import load_backbone
from cast_rl.backbones.finetuning import LORA_FILE
from cast_rl.ema import WeightAverage
from cast_rl.saving import save_weights
from cast_rl.seeding import derive_seed


class Run:
    """A tiny run of training that can be saved and resumed."""

    def __init__(self, folder, *, how="lora", decay=0.6):
        torch.manual_seed(0)
        self.backbone = load_backbone(folder, fast_vae=False)
        if how == "lora":
            self.backbone.add_lora(rank=2, alpha=4)
        else:
            self.backbone.train_weights(keep_reference=False, only=["img_mlp"])
        self.weights = torch.nn.ParameterList(self.backbone.trainable_parameters())
        self.optimizer = torch.optim.AdamW(self.weights, lr=0.02)
        self.average = WeightAverage(self.backbone, decay)
        self.cond = self.backbone.encode(["two red cats"])
        self.steps = 0

    def checkpoint(self):
        return Checkpoint(weights=self.weights, optimizer=self.optimizer, average=self.average)

    def velocity(self):
        return self.backbone.velocity(self.backbone.initial_latents([1], 64, 64), 0.6, self.cond)

    def train(self, steps):
        for _ in range(steps):
            x = self.backbone.initial_latents([derive_seed(0, self.steps)], 64, 64)
            (self.backbone.velocity(x, 0.5, self.cond) - 1).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.average.step()
            self.steps += 1

    @torch.no_grad()
    def evaluate(self):
        with self.average.averaged():
            return self.velocity()

    def raw(self):
        return [w.detach().clone() for w in self.weights]


def same(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("how", ["lora", "weights"])
def test_train_evaluate_train_save_resume(qwen_folder, tmp_path, how):
    run, undisturbed = Run(qwen_folder, how=how), Run(qwen_folder, how=how)
    run.train(3)
    before, plain = run.raw(), run.velocity()
    averaged = run.evaluate()
    assert same(run.raw(), before) and torch.equal(run.velocity(), plain)
    assert (averaged - plain).abs().max() > 1e-3
    run.train(2)
    undisturbed.train(5)
    assert same(run.raw(), undisturbed.raw()), "looking at the average changed the training"

    run.checkpoint().save(tmp_path / "checkpoint")
    resumed = Run(qwen_folder, how=how)
    resumed.checkpoint().load(tmp_path / "checkpoint", map_location="cpu")
    resumed.steps = 5
    assert same(resumed.raw(), run.raw()) and torch.equal(resumed.evaluate(), run.evaluate())
    for each in (run, resumed):
        each.train(2)
    assert same(resumed.raw(), run.raw()) and torch.equal(resumed.evaluate(), run.evaluate())


def test_both_are_saved_each_under_its_name_with_the_settings(qwen_folder, tmp_path):
    run = Run(qwen_folder)
    run.train(3)
    before = run.raw()
    raw, average = save_weights(
        run.backbone, tmp_path, average=run.average, settings={"optim": {"learning_rate": 0.02}}
    )
    assert (raw.name, average.name) == ("lora", "lora_ema") and same(run.raw(), before)
    ours, theirs = load_file(raw / LORA_FILE), load_file(average / LORA_FILE)
    assert ours.keys() == theirs.keys() and any(not torch.equal(ours[k], theirs[k]) for k in ours)
    for folder, velocity in ((raw, run.velocity()), (average, run.evaluate())):
        fresh = load_backbone(qwen_folder)
        fresh.load_lora(folder)
        assert torch.equal(fresh.velocity(fresh.initial_latents([1], 64, 64), 0.6, run.cond), velocity)
        DiffusionPipeline.from_pretrained(qwen_folder).load_lora_weights(folder)
    records = [json.loads((folder / "cast_rl.json").read_text()) for folder in (raw, average)]
    assert records[0]["weights"] == "raw" and "decay" not in records[0]
    assert (records[1]["weights"], records[1]["decay"], records[1]["steps"]) == ("average", 0.6, 3)
    # F13: what the network read of a text depends on it.
    assert all(r["max_sequence_length"] == 512 for r in records)
    assert all(r["settings"] == {"optim": {"learning_rate": 0.02}} and r["family"] == "Qwen-Image" for r in records)


def test_whole_pipelines_are_saved_under_both_names(qwen_folder, tmp_path):
    run = Run(qwen_folder, how="weights")
    run.train(2)
    folders = save_weights(run.backbone, tmp_path, average=run.average)
    assert [f.name for f in folders] == ["pipeline", "pipeline_ema"]
    for folder, velocity in zip(folders, (run.velocity(), run.evaluate()), strict=True):
        fresh = load_backbone(folder, fast_vae=False)
        assert torch.equal(fresh.velocity(fresh.initial_latents([1], 64, 64), 0.6, run.cond), velocity)


def test_the_average_is_the_documented_one(qwen_folder):
    run = Run(qwen_folder)
    expected = run.raw()
    for n in range(4):
        run.train(1)
        # EMAModel counts from one and takes its first step whole.
        d = 0.0 if n == 0 else min(0.6, (1 + n) / (10 + n))
        expected = [d * e + (1 - d) * w for e, w in zip(expected, run.raw(), strict=True)]
    for ours, theirs in zip(run.average.state_dict()["shadow_params"], expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_an_error_inside_puts_the_weights_back(qwen_folder):
    run = Run(qwen_folder)
    run.train(2)
    before = run.raw()
    with pytest.raises(KeyError), run.average.averaged():
        raise KeyError
    assert same(run.raw(), before)
    with pytest.raises(RuntimeError, match=r"changed inside averaged\(\)"), run.average.averaged(), torch.no_grad():
        run.weights[0].add_(1)
    assert same(run.raw(), before)


def test_what_cannot_be_meant_is_named(qwen_folder):
    run = Run(qwen_folder)
    with run.average.averaged(), pytest.raises(RuntimeError, match=r"step inside averaged\(\)"):
        run.average.step()
    with run.average.averaged(), pytest.raises(RuntimeError, match=r"averaged inside averaged\(\)"):
        with run.average.averaged():
            raise AssertionError
    for decay in (0.0, 1.0, 1.5):
        with pytest.raises(ValueError, match="between 0 and 1"):
            WeightAverage(run.backbone, decay)
    with pytest.raises(ValueError, match="nothing is trained"):
        WeightAverage(load_backbone(qwen_folder), 0.9)
    state = run.average.state_dict()
    with pytest.raises(ValueError, match="kept an average.*decay=None"):
        WeightAverage(run.backbone, None).load_state_dict(state)
    with pytest.raises(ValueError, match="of other shapes"):
        run.average.load_state_dict(state | {"shadow_params": state["shadow_params"][1:]})
    run.weights[0].requires_grad_(False)
    with pytest.raises(RuntimeError, match="trains other weights"):
        run.average.step()


def test_without_a_decay_there_is_no_average(qwen_folder, tmp_path):
    run = Run(qwen_folder, decay=None)
    run.train(1)
    assert torch.equal(run.evaluate(), run.velocity()) and run.average.state_dict() == {}
    assert [f.name for f in save_weights(run.backbone, tmp_path, average=run.average)] == ["lora"]
    run.checkpoint().save(tmp_path / "checkpoint")
    run.checkpoint().load(tmp_path / "checkpoint")


def test_settings_that_json_cannot_hold_are_refused_before_anything_is_written(qwen_folder, tmp_path):
    with pytest.raises(TypeError, match="JSON"):
        save_weights(Run(qwen_folder).backbone, tmp_path, settings={"lr": torch.ones(1)})
    assert not list(tmp_path.iterdir())
