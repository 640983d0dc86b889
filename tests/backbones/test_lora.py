"""For every family: each adapter learns, what is saved loads in the stock pipeline, and resumes as if never saved."""

import pytest
import torch
from families import CASES, PLAIN, PROMPTS, stock_images
from peft.tuners.tuners_utils import BaseTunerLayer

from cast_rl.backbones import FAMILIES, load_backbone
from cast_rl.backbones.finetuning import LORA_FILE

LORA = {"rank": 2, "alpha": 4}
PLAINEST = {case.pipeline_class: case for case in reversed(CASES)}


def load(folder, pipeline_class, dtype=torch.float32, **options):
    torch.manual_seed(0)
    return load_backbone(folder, dtype=dtype, **PLAIN[pipeline_class], **options)


def optimizer_of(backbone):
    return torch.optim.AdamW(backbone.trainable_parameters(), lr=0.05)


def loss_at(backbone, cond, step):
    x = backbone.initial_latents([step, 100 + step], 64, 64)
    return (backbone.velocity(x, 0.3 + 0.1 * step, cond) - 1).square().mean()


def train(backbone, optimizer, steps):
    """Train through the given steps; gradients of the last one are left in place."""
    cond = backbone.encode(PROMPTS)
    for step in steps:
        optimizer.zero_grad()
        loss_at(backbone, cond, step).backward()
        optimizer.step()


def adapters(pipe):
    return {name for name, m in pipe.transformer.named_modules() if isinstance(m, BaseTunerLayer)}


def equal(ours, theirs):
    pairs = list(zip(ours, theirs, strict=True))
    return bool(pairs) and all(torch.equal(a, b) for a, b in pairs)


@pytest.fixture(scope="module", params=FAMILIES)
def trained(request, tiny_folder, tmp_path_factory):
    """(pipeline class, backbone trained for two steps, its optimizer, the folder in which its LoRA is saved)."""
    pipeline_class = request.param
    backbone = load(tiny_folder(pipeline_class), pipeline_class, lora=LORA)
    optimizer = optimizer_of(backbone)
    train(backbone, optimizer, range(2))
    folder = tmp_path_factory.mktemp("lora")
    backbone.save_lora(folder)
    return pipeline_class, backbone, optimizer, folder


def test_targets_are_exact_names_and_each_receives_a_gradient(trained):
    _, backbone, _, _ = trained
    assert adapters(backbone.pipe) == set(backbone.lora_targets())
    assert len(backbone.trainable_parameters()) == 2 * len(backbone.lora_targets())
    for name, parameter in backbone.transformer.named_parameters():
        assert parameter.requires_grad == ("lora_" in name)
        if parameter.requires_grad:
            assert parameter.grad.abs().max() > 0, name


def test_the_stock_pipeline_gives_the_same_pixels(trained, load_stock):
    pipeline_class, backbone, _, folder = trained
    case = PLAINEST[pipeline_class]
    assert [path.name for path in folder.iterdir()] == [LORA_FILE]
    expected = stock_images(backbone.pipe, case, (64, 64), 2)
    stock = load_stock(pipeline_class)
    untrained = stock_images(stock, case, (64, 64), 2)
    stock.load_lora_weights(folder)
    assert adapters(stock) == set(backbone.lora_targets())
    assert (expected - untrained).abs().max() > 1e-2
    assert torch.equal(stock_images(stock, case, (64, 64), 2), expected)


def test_resuming_equals_training_on(trained, tiny_folder):
    pipeline_class, backbone, optimizer, folder = trained
    uninterrupted = load(tiny_folder(pipeline_class), pipeline_class, lora=LORA)
    train(uninterrupted, optimizer_of(uninterrupted), range(4))
    resumed = load(tiny_folder(pipeline_class), pipeline_class)
    resumed.load_lora(folder)
    assert equal(resumed.trainable_parameters(), backbone.trainable_parameters())
    going_on = optimizer_of(resumed)
    going_on.load_state_dict(optimizer.state_dict())
    train(resumed, going_on, range(2, 4))
    assert equal(resumed.trainable_parameters(), uninterrupted.trainable_parameters())


def test_the_reference_is_the_model_before_training(trained, shared_stock):
    pipeline_class, backbone, _, _ = trained
    base = FAMILIES[pipeline_class](shared_stock(pipeline_class), **PLAIN[pipeline_class])
    cond = base.encode(PROMPTS)
    with torch.no_grad():
        expected, ours = loss_at(base, cond, 1), loss_at(backbone, cond, 1)
        with backbone.reference():
            assert loss_at(backbone, cond, 1) == expected != ours
        assert loss_at(backbone, cond, 1) == ours


def test_gradient_checkpointing_changes_no_gradient(trained):
    _, backbone, _, _ = trained
    weights, cond = backbone.trainable_parameters(), backbone.encode(PROMPTS)
    plain = torch.autograd.grad(loss_at(backbone, cond, 1), weights)
    backbone.gradient_checkpointing()
    runs = []
    hook = backbone.transformer.get_submodule(backbone.lora_targets()[0]).register_forward_hook(
        lambda *_: runs.append(1)
    )
    checkpointed = torch.autograd.grad(loss_at(backbone, cond, 1), weights)
    hook.remove()
    backbone.gradient_checkpointing(False)
    assert len(runs) == 2
    for ours, theirs in zip(checkpointed, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_a_text_length_that_the_network_reads_is_recorded(trained, shared_stock):
    """F13: without a mask the velocity depends on the padded length, so that a LoRA belongs to one."""
    pipeline_class, _, _, folder = trained
    length = PLAIN[pipeline_class]["max_sequence_length"]
    other = FAMILIES[pipeline_class](
        shared_stock(pipeline_class), **(PLAIN[pipeline_class] | {"max_sequence_length": length + 8})
    )
    if other.reads_padding:
        with pytest.raises(ValueError, match=f"padded to {length} tokens, .* pads to {length + 8}.*={length}"):
            other.load_lora(folder)
        assert not adapters(other.pipe)


@pytest.mark.parametrize("pipeline_class", FAMILIES)
def test_adapters_are_float32_on_a_bfloat16_base_and_survive_saving(tiny_folder, tmp_path, pipeline_class):
    backbone = load(tiny_folder(pipeline_class), pipeline_class, torch.bfloat16, lora=LORA)
    train(backbone, optimizer_of(backbone), range(1))
    weights = backbone.trainable_parameters()
    assert {p.dtype for p in weights} == {torch.float32}
    assert {p.dtype for p in backbone.transformer.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert any(not torch.equal(p, p.bfloat16().float()) for p in weights)
    saved = [p.detach().clone() for p in weights]
    backbone.save_lora(tmp_path)
    train(backbone, optimizer_of(backbone), range(1))
    assert not equal(weights, saved)
    backbone.load_lora(tmp_path)
    assert {p.dtype for p in backbone.trainable_parameters()} == {torch.float32}
    assert equal(backbone.trainable_parameters(), saved)


def test_an_ending_that_is_a_list_in_some_blocks_means_the_linear_ones(load_stock):
    """In FLUX.2 ``attn.to_out`` is a Linear layer in single blocks and a list of layers in double ones."""
    backbone = load_backbone(load_stock("Flux2Pipeline"), guidance=1.0)
    backbone.add_lora(rank=2, targets=["attn.to_out"])
    assert adapters(backbone.pipe) == {"single_transformer_blocks.0.attn.to_out"}
