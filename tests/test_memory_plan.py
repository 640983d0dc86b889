"""Plans count what the models' own code needs, and recipes say what the plans say."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from tiny_pipelines import qwen_image_pipeline

from cast_rl.backbones import load_backbone
from cast_rl.backbones.memory import check_memory_settings, quantization_config
from cast_rl.live_bytes import LiveBytes, peak_bytes
from cast_rl.memory_budget import Choice, Machine, best_lora, choices, full_bytes, plan_lora, report
from cast_rl.memory_plan import Needs, Size, keep_blocks, meta_backbone, needs, on_meta, size_of, train_peak
from cast_rl.settings import check_training
from cast_rl.window import FixedWindow, check_windows

EXAMPLES = Path(__file__).parents[1] / "examples"
ARCHITECTURES = OmegaConf.to_container(OmegaConf.load(EXAMPLES / "config" / "architectures.yaml"))
RECIPES = {path.stem: OmegaConf.load(path) for path in (EXAMPLES / "config" / "backbone").glob("*.yaml")}
# Billions of weights, as the models' makers give them.
PUBLISHED = {
    "flux2_dev": 32,
    "flux2_klein_4b": 4,
    "qwen_image_2512": 20,
    "sd35_medium": 2.5,
    "flux1_dev": 12,
    "z_image": 6,
}
SOME = Needs(
    transformer=Size(20_000_000_000, 20_000_000_000),
    vae=Size(100_000_000, 0),
    text_encoders=Size(8_000_000_000, 8_000_000_000),
    judge=Size(8_000_000_000, 7_000_000_000),
    adapters=200_000_000,
    train=5_000_000_000,
    rollout=1_000_000_000,
    decode=2_000_000_000,
    judging=2_400_000_000,
    block=300_000_000,
)


def test_live_bytes_counts_what_is_made_until_it_is_freed():
    x = torch.ones(1000)
    with LiveBytes() as live:
        y = x + 1
        assert (live.now, live.peak) == (4000, 4000)
        y.add_(1)
        z = y.view(10, 100).t()
        assert live.now == 4000
        z = z.contiguous()
        assert live.now == 8000
        del y
        assert (live.now, live.peak) == (4000, 8000)
        x.mul_(2)
        assert live.now == 4000
    del z
    assert live.now == 0


@pytest.fixture
def deep():
    """A tiny pipeline of five blocks, whose tensors are large beside what surrounds them."""
    pipe = qwen_image_pipeline()
    pipe.register_modules(transformer=QwenImageTransformer2DModel(**dict(pipe.transformer.config) | {"num_layers": 5}))
    return pipe


def training(backbone):
    backbone.add_lora(rank=2)
    backbone.gradient_checkpointing()
    device = backbone.device
    x = torch.zeros(1, *backbone.latent_shape(256, 256), device=device)
    cond = {"embeds": torch.zeros(1, 32, 16, device=device), "mask": torch.ones(1, 32, dtype=torch.bool, device=device)}
    return lambda: backbone.velocity(x, 0.5, cond).square().mean().backward()


def allocated_peak(run):
    """Most bytes that torch's CPU allocator had given out at once while it ran."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    total = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
    return peak


def test_planned_activations_are_those_that_a_real_training_step_allocates(deep):
    """The plan runs two and three blocks on the meta device; five blocks are run and measured."""
    backbone = load_backbone(deep)
    step = training(backbone)
    step()
    backbone.transformer.zero_grad()
    alive = peak_bytes(step)
    backbone.transformer.zero_grad()
    allocated = allocated_peak(step)
    assert 0.9 * allocated < alive < 1.02 * allocated

    entry = {
        "pipeline": "QwenImagePipeline",
        "transformer": {"class": "QwenImageTransformer2DModel", "config": dict(deep.transformer.config)},
        "vae": {"class": "AutoencoderKLQwenImage", "config": dict(deep.vae.config)},
    }
    planned = meta_backbone(entry)
    planned.pipe.transformer.float()
    planned.dtype = torch.float32
    step = training(planned)
    depths = keep_blocks(planned, 3)
    assert depths == {"transformer_blocks": 5}
    assert train_peak(planned, depths, step) == pytest.approx(alive, rel=0.05)
    assert len(planned.pipe.transformer.transformer_blocks) == 3


def test_without_checkpointing_more_is_needed(deep):
    backbone = load_backbone(deep)
    step = training(backbone)
    step()
    with_checkpointing = peak_bytes(step)
    backbone.gradient_checkpointing(False)
    assert peak_bytes(step) > 2 * with_checkpointing


@pytest.fixture(scope="module", params=sorted(RECIPES))
def counted(request):
    name = request.param
    recipe = OmegaConf.to_container(RECIPES[name])
    return name, needs(recipe, ARCHITECTURES[name], ARCHITECTURES["judges"]["qwen3_vl_8b"])


def test_recipes_give_the_budgets_that_are_planned(counted):
    name, need = counted
    assert need.transformer.total / 1e9 == pytest.approx(PUBLISHED[name], rel=0.05)
    text = (EXAMPLES / "config" / "backbone" / f"{name}.yaml").read_text()
    assert "it has not been run on the real weights" in text
    for line in report(need, ema=True):
        assert f"#   {line}\n" in text, f"write this into {name}.yaml:\n#   {line}"


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_recipes_are_settings_that_hold_together(name):
    recipe, entry = RECIPES[name], ARCHITECTURES[name]
    levers = check_memory_settings(recipe.memory)
    encoders = len(entry["text_encoders"])
    assert len(levers["group_offload"]["components"]) == encoders
    backbone = meta_backbone(entry, recipe.model.guidance)
    assert backbone.uses_negative == (recipe.model.negative_prompt is not None)
    backbone.device = torch.device("cpu")
    first, end = recipe.window
    sigmas = backbone.sigmas(recipe.rollout.steps, recipe.model.height, recipe.model.width)
    check_windows(sigmas, [first], end - first, transition=recipe.rollout.transition, a=recipe.rollout.noise)
    transitions = recipe.rollout.group_size * recipe.rollout.prompts_per_iteration * (end - first)
    assert transitions % recipe.optim.batch_size == 0 and recipe.rollout.steps <= recipe.model.steps


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_recipes_compose_with_the_training_script_and_quantization(name):
    quantized = ["quantization=nf4", "judge_quantization=nf4", "optim.ema=0.5"]
    with initialize_config_dir(str(EXAMPLES / "config"), version_base="1.3"):
        cfg = compose("train_cast", overrides=[f"backbone={name}", *quantized])
        as_is = compose("train_cast", overrides=[f"backbone={name}"])
        measured = compose("measure_window", overrides=[f"backbone={name}"])
    assert cfg.model.source == RECIPES[name].model.source and cfg.optim.ema == 0.5 and cfg.seed == 0
    assert check_memory_settings(cfg.memory)["quantization"]["transformer"]["bnb_4bit_quant_type"] == "nf4"
    assert cfg.judge_quantization.bnb_4bit_quant_type == "nf4" and cfg.memory.vae_slicing
    assert as_is.memory.quantization is None and as_is.judge_quantization is None
    assert check_training(as_is) == FixedWindow.between(RECIPES[name].window)
    assert measured.model.source == as_is.model.source and measured.picture is None
    assert measured.rollout.steps == as_is.rollout.steps and not as_is.prompts.source.startswith("miniature")


def test_without_a_recipe_the_training_script_takes_the_miniature():
    with initialize_config_dir(str(EXAMPLES / "config"), version_base="1.3"):
        plain = compose("train_cast")
    assert plain.model.source == "miniature" and plain.memory.quantization is None and plain.judge_quantization is None


def test_the_way_to_fit_flux2_dev_on_24_gigabytes_is_counted():
    text = (EXAMPLES / "config" / "backbone" / "flux2_dev.yaml").read_text()
    hint = re.search(r"# For 1x24: (.*) quantization=nf4 judge_device=cpu, counted as (.*)\.\n", text)
    recipe = OmegaConf.merge(RECIPES["flux2_dev"], OmegaConf.from_dotlist(hint[1].split()))
    recipe = OmegaConf.to_container(recipe)
    assert recipe["optim"]["ema"] is None and recipe["model"]["lora"]["rank"] < 32
    plan = best_lora(needs(recipe, ARCHITECTURES["flux2_dev"], ARCHITECTURES["judges"]["qwen3_vl_8b"]), Machine(1, 24))
    assert plan.fits and plan.choice == Choice("nf4", "elsewhere", "offloaded")
    assert hint[2] == f"{plan.bytes / 1e9:.1f} GB"


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
def test_the_int8_recipe_is_one_of_torchao():
    spec = OmegaConf.load(EXAMPLES / "config" / "quantization" / "int8.yaml")
    config = quantization_config(spec, {"transformer": ["diffusers", "QwenImageTransformer2DModel"]})
    assert type(config.quant_mapping["transformer"].quant_type).__name__ == "Int8WeightOnlyConfig"


def test_the_least_loss_that_fits_is_chosen():
    assert [str(c) for c in choices()][:3] == [
        "bf16; judge bf16; text encoders device",
        "bf16; judge bf16; text encoders offloaded",
        "int8; judge bf16; text encoders device",
    ]
    assert best_lora(SOME, Machine(1, 140)).choice == Choice("bf16", "bf16", "device")
    assert best_lora(SOME, Machine(1, 80)).choice == Choice("bf16", "bf16", "offloaded")
    small = best_lora(SOME, Machine(1, 24))
    assert small.fits and small.choice == Choice("nf4", "elsewhere", "offloaded")
    assert not best_lora(SOME, Machine(1, 12)).fits and "does not fit" in str(best_lora(SOME, Machine(1, 12)))
    assert best_lora(SOME, Machine(8, 80)).choice == best_lora(SOME, Machine(1, 80)).choice


def test_a_plan_is_the_sum_of_its_parts():
    plan = plan_lora(SOME, Machine(1, 80), Choice("nf4", "bf16", "offloaded"), ema=True)
    weights, adapters, judge = 20 * (0.5 + 4 / 64), 0.2 * 16, 16
    assert plan.bytes / 1e9 == pytest.approx(weights + adapters + 0.2 + judge + 5) and plan.largest == "train"
    without = plan_lora(SOME, Machine(1, 80), Choice("nf4", "elsewhere", "device"), ema=False)
    assert without.bytes / 1e9 == pytest.approx(weights + 0.2 * 12 + 0.2 + 16) and without.largest == "encoding"
    assert full_bytes(SOME, Machine(8, 80)) / 1e9 == pytest.approx(40 + 2.4 + 10 + 0.4)


def test_tied_and_quantizable_weights_are_counted_once():
    config = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "intermediate_size": 16,
        "num_attention_heads": 1,
        "head_dim": 8,
    }
    config |= {"num_key_value_heads": 1, "vocab_size": 100}
    untied, tied = (
        size_of(on_meta({"class": "Qwen3ForCausalLM", "config": config | {"tie_word_embeddings": tie}}))
        for tie in (False, True)
    )
    assert untied.total - tied.total == 800
    assert tied.bytes("nf4") < tied.bytes("int8") < tied.bytes("bf16") == 2 * tied.total
    assert untied.linear == tied.linear, "the output layer stays as it is, be it tied or not"
    with pytest.raises(ValueError, match="'Nothing' is a class of neither"):
        on_meta({"class": "Nothing"})
