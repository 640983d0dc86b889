"""The shipped generator: a stock pipeline folder, small, and as good as the docs say."""

import pytest
import torch
from diffusers import DiffusionPipeline, QwenImagePipeline

from cast_rl.backbones import load_backbone
from cast_rl.backbones.single_frame import single_frame_vae
from cast_rl.evaluation import evaluate
from cast_rl.miniature import GENERATOR, GUIDANCE, STEPS, Oracle, miniature_prompts, pretrain_generator
from cast_rl.miniature.assemble import build_tokenizer
from cast_rl.miniature.muon import BatchedMuon, orthogonalise
from cast_rl.miniature.quality import generate, measure
from cast_rl.prompt_bank import PromptBank
from cast_rl.sampling import ode_rollout

PROMPTS = miniature_prompts(96, seed=4, held_out=True)
SIZE = {"height": 48, "width": 48, "steps": STEPS}


@pytest.fixture(scope="module")
def pipe():
    pipe = DiffusionPipeline.from_pretrained(GENERATOR, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_it_is_a_stock_pipeline_of_at_most_twelve_megabytes(pipe):
    assert isinstance(pipe, QwenImagePipeline)
    files = [f for f in GENERATOR.rglob("*") if f.is_file()]
    assert sum(f.stat().st_size for f in files) <= 12e6
    assert {f.suffix for f in files} <= {".json", ".safetensors", ".txt", ".jinja"}


def test_every_word_is_one_token_and_the_template_has_the_real_length(pipe):
    tokenizer = pipe.tokenizer
    prompt = "two red circles left of an orange square, and three green crosses"
    assert len(tokenizer(prompt).input_ids) == len(prompt.replace(",", " ,").split())
    prefix = pipe.prompt_template_encode.split("{}")[0]
    assert len(tokenizer(prefix).input_ids) == pipe.prompt_template_encode_start_idx == 34
    assert build_tokenizer().get_vocab() == tokenizer.get_vocab()


def test_training_latents_have_mean_zero_and_variance_one_in_every_channel(pipe, monkeypatch):
    """The statistics in the config are those of what the generator learns to draw."""
    monkeypatch.setattr(pretrain_generator, "CHUNK", 200)
    single_frame_vae(pipe.vae)
    packed = pretrain_generator.make_chunk(pipe, 0)["latents"].float()
    latents = pipe._unpack_latents(packed, 48, 48, pipe.vae_scale_factor)  # (N, C, 1, h, w)
    assert latents.mean((0, 2, 3, 4)).abs().max() < 0.2
    assert (latents.std((0, 2, 3, 4)) - 1).abs().max() < 0.25


def test_our_rollout_gives_the_pipelines_images(pipe):
    texts = PROMPTS.texts[:4]
    expected = generate(pipe, texts, seed=3)
    backbone = load_backbone(GENERATOR, guidance=GUIDANCE)
    cond, negative = PromptBank.encode(backbone, texts)(torch.arange(4))
    x = backbone.initial_latents(range(3, 7), 48, 48)
    ours = backbone.decode(ode_rollout(backbone, x, cond, negative, **SIZE))
    assert (ours - expected).abs().max() < 1e-4


def test_it_draws_what_it_was_measured_to_draw(pipe):
    """A coarse guard on 96 prompts; ``pretrain_miniature.py check`` measures 1,000."""
    figures = measure([p.graph for p in PROMPTS], generate(pipe, PROMPTS.texts, seed=0))
    assert 0.15 < figures["strict"] <= figures["all_correct"] < 0.6
    assert figures["crisp"] > 0.93 and figures["atoms"] > 0.65
    assert figures["object"] > 0.85 and 0.45 < figures["position"] < 0.8


def test_evaluation_agrees_with_the_quality_figures(pipe):
    prompts = PROMPTS[:32]
    backbone = load_backbone(GENERATOR, guidance=GUIDANCE)
    bank = PromptBank.encode(backbone, prompts.texts)
    run = evaluate(backbone, Oracle(), prompts, bank, **SIZE, seed=0, batch_size=10)
    figures = measure([p.graph for p in prompts], generate(pipe, prompts.texts, seed=0))
    got = run.figures()
    assert got["all_correct"] == pytest.approx(figures["strict"], abs=1e-4)
    assert got["atom_score"] == pytest.approx(figures["atoms"], abs=1e-3)


def test_muon_orthogonalises_as_torchs_does():
    matrices = torch.randn(3, 16, 40, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrices))
    assert values.min() > 0.6 and values.max() < 1.3
    ours, theirs = (torch.nn.Parameter(torch.randn(16, 40, generator=torch.Generator().manual_seed(1))) for _ in "ab")
    a = BatchedMuon([ours], lr=0.02, weight_decay=0.01)
    b = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.01, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for step in range(3):
        grad = torch.randn(16, 40, generator=torch.Generator().manual_seed(10 + step))
        for p, optimizer in ((ours, a), (theirs, b)):
            p.grad = grad.clone()
            optimizer.step()
    assert (ours - theirs).abs().max() < 0.02 * 0.05, "bfloat16 in torch's version accounts for the rest"
    with pytest.raises(ValueError, match="matrices"):
        BatchedMuon([torch.nn.Parameter(torch.zeros(3))], lr=0.1)
