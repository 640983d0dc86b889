"""What trains gets a gradient, what is saved loads in plain diffusers, the reference is the old model."""

import copy
import json

import pytest
import torch
from diffusers import DiffusionPipeline
from families import CASES, PLAIN, stock_images
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import safe_open

from cast_rl.backbones import FAMILIES, load_backbone
from cast_rl.saving import save_weights

PROMPTS = ["two red cats", "a green bench and a bowl"]


def velocity_at(backbone, sigma=0.6):
    return backbone.velocity(backbone.initial_latents([1, 2], 64, 64), sigma, backbone.encode(PROMPTS))


def train(backbone, steps, optimizer=None):
    optimizer = optimizer or torch.optim.AdamW(backbone.trainable_parameters(), lr=0.02)
    for step in range(steps):
        (velocity_at(backbone, 0.3 + 0.2 * step) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def images(pipe):
    generators = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    call = dict(height=64, width=64, num_inference_steps=3, true_cfg_scale=1.0, output_type="pt")
    return pipe(prompt=list(PROMPTS), generator=generators, **call).images


@pytest.fixture
def lora(qwen_folder):
    backbone = load_backbone(qwen_folder, fast_vae=False)
    backbone.add_lora(rank=3, alpha=6)
    return backbone


def test_a_script_s_settings_choose_what_is_trained(qwen_folder):
    adapters, some = load_backbone(qwen_folder), load_backbone(qwen_folder)
    adapters.make_trainable(lora={"rank": 3}, only=["attn."], keep_reference=True)
    assert len(adapters.trainable_parameters()) == 2 * len(adapters.lora_targets())
    some.make_trainable(only=["txt_mlp"], keep_reference=True)
    trained = {name for name, p in some.transformer.named_parameters() if p.requires_grad}
    assert trained and all("txt_mlp" in name for name in trained)
    with some.reference():
        velocity_at(some)


def test_a_new_lora_changes_nothing_and_is_all_that_trains(lora, qwen_folder):
    assert torch.equal(velocity_at(lora), velocity_at(load_backbone(qwen_folder)))
    names = [name for name, p in lora.transformer.named_parameters() if p.requires_grad]
    assert names and all("lora_" in name for name in names)
    assert len(lora.trainable_parameters()) == len(names) == 2 * len(lora.lora_targets())


def test_every_default_target_is_adapted_and_receives_a_gradient(lora):
    adapted = {name for name, m in lora.transformer.named_modules() if isinstance(m, BaseTunerLayer)}
    assert adapted == set(lora.lora_targets())
    for parameter in lora.trainable_parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    velocity_at(lora).square().mean().backward()
    for name, parameter in lora.transformer.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


def test_the_layers_left_out_never_receive_one(qwen_folder):
    """The last block's text output is not read, so nothing that only feeds it can learn."""
    backbone = load_backbone(qwen_folder)
    last = "transformer_blocks.1."
    text_only = ("attn.add_q_proj", "attn.to_add_out", "txt_mlp.net.0.proj", "txt_mlp.net.2")
    left_out = [last + name for name in text_only]
    assert not set(left_out) & set(backbone.lora_targets())
    backbone.add_lora(rank=2, targets=left_out)
    for parameter in backbone.trainable_parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    velocity = velocity_at(backbone)
    if velocity.requires_grad:
        velocity.square().mean().backward()
    assert all(p.grad is None or p.grad.abs().max() == 0 for p in backbone.trainable_parameters())


def test_a_trained_lora_gives_the_same_pixels_in_a_stock_pipeline(lora, qwen_folder, qwen_pipe, tmp_path):
    before = images(lora.pipe)
    train(lora, steps=2)
    trained = images(lora.pipe)
    assert (trained - before).abs().max() > 1e-2
    lora.save_lora(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pytorch_lora_weights.safetensors"]

    assert torch.equal(images(qwen_pipe), before)
    qwen_pipe.load_lora_weights(tmp_path)
    bound = [m for m in qwen_pipe.transformer.modules() if isinstance(m, BaseTunerLayer)]
    assert len(bound) == len(lora.lora_targets())
    assert torch.equal(images(qwen_pipe), trained)


def test_without_its_alpha_a_lora_would_give_other_pixels(lora, qwen_pipe, tmp_path):
    train(lora, steps=2)
    trained = images(lora.pipe)
    lora.save_lora(tmp_path)
    with safe_open(tmp_path / "pytorch_lora_weights.safetensors", "pt") as file:
        metadata = json.loads(file.metadata()["lora_adapter_metadata"])
        weights = {key: file.get_tensor(key) for key in file.keys()}
    assert metadata["transformer.lora_alpha"] == 6 and metadata["transformer.r"] == 3
    qwen_pipe.load_lora_weights(weights)
    assert (images(qwen_pipe) - trained).abs().max() > 1e-3


def test_a_loaded_lora_goes_on_training_as_if_never_saved(lora, qwen_folder, tmp_path):
    train(lora, steps=2)
    lora.save_lora(tmp_path)
    resumed = load_backbone(qwen_folder, fast_vae=False)
    resumed.load_lora(tmp_path)
    assert torch.equal(velocity_at(resumed), velocity_at(lora))
    train(resumed, steps=2)
    train(lora, steps=2)
    pairs = zip(resumed.trainable_parameters(), lora.trainable_parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)

    lora.load_lora(tmp_path)
    fresh = load_backbone(qwen_folder, fast_vae=False)
    fresh.load_lora(tmp_path)
    assert torch.equal(velocity_at(lora), velocity_at(fresh))


def test_adapters_are_float32_on_a_bfloat16_base_and_survive_saving(qwen_folder, tmp_path):
    backbone = load_backbone(qwen_folder, dtype=torch.bfloat16)
    backbone.add_lora(rank=2)
    train(backbone, steps=1)
    trainable = backbone.trainable_parameters()
    assert {p.dtype for p in trainable} == {torch.float32}
    assert {p.dtype for p in backbone.transformer.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert any(not torch.equal(p, p.bfloat16().float()) for p in trainable)
    backbone.save_lora(tmp_path)
    resumed = load_backbone(qwen_folder, dtype=torch.bfloat16)
    resumed.load_lora(tmp_path)
    pairs = zip(resumed.trainable_parameters(), trainable, strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert torch.equal(velocity_at(resumed), velocity_at(backbone))


def test_the_reference_of_a_lora_is_the_base_and_comes_back_on(lora):
    base = velocity_at(lora)
    train(lora, steps=2)
    trained = velocity_at(lora)
    lora.trainable_parameters()[0].requires_grad_(False)
    wanted = [p.requires_grad for p in lora.transformer.parameters()]
    with lora.reference(), torch.no_grad():
        assert torch.equal(velocity_at(lora), base)
        with lora.reference():
            assert torch.equal(velocity_at(lora), base)
        assert torch.equal(velocity_at(lora), base)
    assert torch.equal(velocity_at(lora), trained)
    assert [p.requires_grad for p in lora.transformer.parameters()] == wanted
    with pytest.raises(KeyError), lora.reference():
        raise KeyError
    assert torch.equal(velocity_at(lora), trained)


def test_a_backward_pass_may_follow_a_look_at_the_reference(lora):
    train(lora, steps=1)
    for parameter in lora.trainable_parameters():
        parameter.grad = None
    velocity = velocity_at(lora)
    with lora.reference(), torch.no_grad():
        base = velocity_at(lora)
    (velocity - base).square().mean().backward()
    assert all(p.grad is not None for p in lora.trainable_parameters())


@pytest.mark.parametrize("how", ["lora", "full"])
def test_gradient_checkpointing_changes_no_gradient(qwen_folder, how):
    gradients = []
    for enabled in (False, True):
        backbone = load_backbone(qwen_folder, gradient_checkpointing=enabled)
        assert backbone.transformer.gradient_checkpointing is enabled
        torch.manual_seed(0)
        backbone.add_lora(rank=2) if how == "lora" else backbone.train_weights(keep_reference=False)
        velocity_at(backbone).square().mean().backward()
        gradients.append([p.grad for p in backbone.trainable_parameters()])
        backbone.gradient_checkpointing(False)
        assert not backbone.transformer.gradient_checkpointing
    for plain, checkpointed in zip(*gradients, strict=True):
        assert (plain is None) == (checkpointed is None)
        if plain is not None:
            torch.testing.assert_close(checkpointed, plain, rtol=0, atol=1e-6)


@pytest.mark.parametrize("pipeline_class", FAMILIES)
def test_full_fine_tuning_trains_all_and_saves_a_pipeline(tiny_folder, tmp_path, pipeline_class):
    options = PLAIN[pipeline_class]
    backbone = load_backbone(tiny_folder(pipeline_class), **options)
    base = velocity_at(backbone)
    backbone.train_weights(keep_reference=True)
    assert len(backbone.trainable_parameters()) == len(list(backbone.transformer.parameters()))
    train(backbone, steps=2)
    trained = velocity_at(backbone)
    assert (trained - base).abs().max() > 1e-2
    with backbone.reference(), torch.no_grad():
        assert torch.equal(velocity_at(backbone), base)
    assert torch.equal(velocity_at(backbone), trained)

    (folder,) = save_weights(backbone, tmp_path)
    assert not list(folder.rglob("*.bin")) and not list(folder.rglob("*.pt"))
    stock = DiffusionPipeline.from_pretrained(folder)
    stock.set_progress_bar_config(disable=True)
    # On a CPU the kernel of a convolution depends on whether its weights require a gradient.
    for module in (backbone.transformer, stock.transformer, stock.vae):
        module.requires_grad_(False)
    case = next(case for case in CASES if case.pipeline_class == pipeline_class)
    ours, theirs = (stock_images(pipe, case, (64, 64), 2) for pipe in (backbone.pipe, stock))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("pipeline_class", FAMILIES)
def test_a_saved_pipeline_is_loaded_with_the_text_length_it_was_trained_with(tiny_folder, tmp_path, pipeline_class):
    """F13, for the families whose networks read the padding."""
    options = PLAIN[pipeline_class]
    backbone = load_backbone(tiny_folder(pipeline_class), **options)
    backbone.train_weights(keep_reference=False)
    (folder,) = save_weights(backbone, tmp_path)
    length = options["max_sequence_length"]
    assert json.loads((folder / "cast_rl.json").read_text())["max_sequence_length"] == length
    longer = options | {"max_sequence_length": length + 8}
    if backbone.reads_padding:
        with pytest.raises(ValueError, match=f"padded to {length} tokens, .* pads to {length + 8}, .*={length}"):
            load_backbone(folder, **longer)
    else:
        assert load_backbone(folder, **longer).max_sequence_length == length + 8
    assert load_backbone(folder, **options).max_sequence_length == length


def test_training_all_weights_in_low_precision_is_warned_of(qwen_folder):
    with pytest.warns(UserWarning, match=r"trained in torch\.bfloat16.*dtype='float32'"):
        load_backbone(qwen_folder, dtype="bfloat16").train_weights(keep_reference=False)


def test_a_reference_that_was_not_kept_is_an_error(qwen_folder):
    backbone = load_backbone(qwen_folder)
    with backbone.reference():
        velocity_at(backbone)
    backbone.train_weights(keep_reference=False)
    with pytest.raises(RuntimeError, match="keep_reference=True"), backbone.reference():
        pass


def test_a_wrapped_transformer_still_answers(lora):
    """DDP and compiled modules take the place of `transformer`; the reference reaches through them."""
    base = velocity_at(lora)
    train(lora, steps=1)
    wrapped = copy.copy(lora)
    wrapped.transformer = torch.nn.DataParallel(lora.transformer)
    assert torch.equal(velocity_at(wrapped), velocity_at(lora))
    with wrapped.reference(), torch.no_grad():
        assert torch.equal(velocity_at(wrapped), base)
    assert len(wrapped.trainable_parameters()) == len(lora.trainable_parameters())


def test_mistakes_are_named(lora, qwen_folder, tmp_path):
    with pytest.raises(RuntimeError, match="has adapters already"):
        lora.add_lora(rank=2)
    with pytest.raises(RuntimeError, match="use save_lora"):
        lora.save(tmp_path)
    with pytest.raises(RuntimeError, match="LoRA adapters; load a fresh"):
        lora.train_weights(keep_reference=False)
    plain = load_backbone(qwen_folder)
    with pytest.raises(ValueError, match=r"'attn\.to_qq' names no Linear .*attn\.to_q"):
        plain.add_lora(rank=2, targets=["attn.to_k", "attn.to_qq"])
    with pytest.raises(ValueError, match="rank must be at least 1"):
        plain.add_lora(rank=0)
    with pytest.raises(RuntimeError, match="call add_lora"):
        plain.save_lora(tmp_path)
    with pytest.raises(FileNotFoundError, match="pytorch_lora_weights"):
        plain.load_lora(tmp_path / "nowhere")
    plain.add_lora(rank=2, targets=["attn.to_q"])
    assert len(plain.trainable_parameters()) == 2 * 2


def test_some_of_the_weights_are_trained(qwen_folder):
    backbone = load_backbone(qwen_folder)
    backbone.train_weights(keep_reference=False, only=["txt_mlp", "norm_out"])
    trained = {name for name, p in backbone.transformer.named_parameters() if p.requires_grad}
    assert trained and all("txt_mlp" in name or "norm_out" in name for name in trained)
    assert len(backbone.trainable_parameters()) == len(trained)
    with pytest.raises(ValueError, match=r"'txt_mpl'.*txt_mlp"):
        load_backbone(qwen_folder).train_weights(keep_reference=False, only=["txt_mpl"])
