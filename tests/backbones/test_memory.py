"""Each memory lever calls the library's own function with what the setting says, or names what is wrong with it."""

import importlib.metadata
import importlib.util
from types import SimpleNamespace

import pytest
import torch
from diffusers import BitsAndBytesConfig, DiffusionPipeline
from diffusers.hooks.group_offloading import _is_group_offload_enabled
from omegaconf import OmegaConf
from tiny_pipelines import qwen_image_pipeline
from transformers import BitsAndBytesConfig as TextBitsAndBytesConfig

from cast_rl.backbones import free_text_encoders, load_backbone, memory
from cast_rl.backbones.memory import check_memory_settings, quantization_config
from cast_rl.fingerprint import encoding_fingerprint

PROMPTS = ["two red cats", "a green bench and a bowl"]
INDEX = {
    "_class_name": "QwenImagePipeline",
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "transformer": ["diffusers", "QwenImageTransformer2DModel"],
    "text_encoder": ["transformers", "Qwen2_5_VLForConditionalGeneration"],
    "vae": ["diffusers", "AutoencoderKLQwenImage"],
}
NF4 = {"backend": "bitsandbytes_4bit", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def velocity_at(backbone, sigma=0.6):
    return backbone.velocity(backbone.initial_latents([1, 2], 64, 64), sigma, backbone.encode(PROMPTS))


@pytest.fixture
def calls(monkeypatch):
    """Replaces a method by one that records its arguments: ``calls(obj, "method")`` gives the list of them."""

    def record(owner, name):
        seen = []
        monkeypatch.setattr(owner, name, lambda *args, **kwargs: seen.append((args, kwargs)), raising=False)
        return seen

    return record


@pytest.fixture
def bitsandbytes(monkeypatch):
    """Its config classes ask for the version that is installed, and here none has to be."""
    version = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "0.50.0" if name == "bitsandbytes" else version(name)
    )


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"vae_tilling": True}, "memory.vae_tilling is unknown, did you mean vae_tiling"),
        ({"forward_batch": 0}, "memory.forward_batch=0 must be a whole number"),
        ({"forward_batch": True}, "memory.forward_batch=True must be a whole number"),
        ({"vae_slicing": {}}, "memory.vae_slicing={} must be true or false"),
        ({"quantization": "nf4"}, "memory.quantization='nf4' must be a mapping"),
        ({"vae_tiling": 3}, "memory.vae_tiling=3 must be true, false or a mapping"),
        ({"attention_backend": 1}, "memory.attention_backend=1 must be a string"),
    ],
)
def test_settings_of_the_wrong_name_or_kind_are_named(qwen_folder, settings, named):
    with pytest.raises(ValueError, match=named):
        load_backbone(qwen_folder, memory=settings)


def test_settings_that_are_off_are_left_out_and_several_mistakes_are_one_message():
    config = OmegaConf.create({"vae_slicing": False, "prompt_bank": None, "compile_repeated_blocks": {}})
    assert check_memory_settings(config) == {"compile_repeated_blocks": {}}
    assert check_memory_settings(None) == {}
    with pytest.raises(ValueError, match=r"memory\.vae is unknown.*; memory\.forward_batch=-1"):
        check_memory_settings({"vae": 1, "forward_batch": -1})


def test_the_defaults_change_nothing(qwen_folder):
    off = dict.fromkeys(memory.SETTINGS) | {"vae_slicing": False}
    assert torch.equal(velocity_at(load_backbone(qwen_folder, memory=off)), velocity_at(load_backbone(qwen_folder)))


def test_quantization_becomes_the_config_class_of_each_components_library(bitsandbytes):
    spec = OmegaConf.create({"transformer": NF4, "text_encoder": NF4 | {"bnb_4bit_compute_dtype": "bfloat16"}})
    mapping = quantization_config(spec, INDEX).quant_mapping
    assert type(mapping["transformer"]) is BitsAndBytesConfig
    assert type(mapping["text_encoder"]) is TextBitsAndBytesConfig
    assert mapping["transformer"].load_in_4bit and mapping["transformer"].bnb_4bit_quant_type == "nf4"
    assert mapping["text_encoder"].bnb_4bit_compute_dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ({"transfomer": NF4}, r"memory\.quantization\.transfomer: the pipeline has no such model; it has transformer"),
        ({"scheduler": NF4}, r"memory\.quantization\.scheduler: the pipeline has no such model"),
        ({"transformer": {"backend": "bits"}}, r"memory\.quantization\.transformer\.backend='bits'.*torchao"),
        ({"transformer": "nf4"}, r"memory\.quantization\.transformer\.backend='nf4'"),
        ({"transformer": NF4 | {"bnb_quant_type": 1}}, r"transformer\.bnb_quant_type.*mean bnb_4bit_quant_type"),
        ({"transformer": NF4 | {"load_in_8bit": True}}, r"transformer: backend bitsandbytes_4bit needs load_in_4bit"),
    ],
)
def test_quantization_that_cannot_be_meant_is_named(bitsandbytes, spec, named):
    with pytest.raises(ValueError, match=named):
        quantization_config(spec, INDEX)


def test_the_quantization_config_reaches_from_pretrained_and_must_have_an_effect(
    qwen_folder, bitsandbytes, monkeypatch
):
    given, load = {}, DiffusionPipeline.from_pretrained

    def from_pretrained(source, quantization_config, **options):
        given.update(quantization_config.quant_mapping)
        return load(source, **options)

    monkeypatch.setattr(DiffusionPipeline, "from_pretrained", from_pretrained)
    with pytest.raises(ValueError, match=r"memory\.quantization\.transformer=.*left QwenImageTransformer2DModel as it"):
        load_backbone(qwen_folder, memory={"quantization": {"transformer": NF4}})
    assert given["transformer"].load_in_4bit
    with pytest.raises(ValueError, match="takes effect on loading"):
        load_backbone(qwen_image_pipeline(), memory={"quantization": {"transformer": NF4}})


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
def test_a_lora_trains_on_an_int8_transformer(qwen_folder, tmp_path):
    int8 = {"backend": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_version": 2}}}
    int8["quant_type"]["default"]["_data"] = {}
    backbone = load_backbone(
        qwen_folder, memory={"quantization": {"transformer": int8}, "gradient_checkpointing": True}
    )
    gap = (velocity_at(backbone) - velocity_at(load_backbone(qwen_folder))).abs().max()
    assert 0 < gap < 0.2
    with pytest.raises(RuntimeError, match="quantized weights cannot be trained"):
        backbone.train_weights(keep_reference=False)
    backbone.add_lora(rank=2)
    velocity_at(backbone).square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in backbone.trainable_parameters())
    backbone.save_lora(tmp_path)


@pytest.mark.parametrize("to_disk", [False, True])
def test_group_offload_of_text_encoder_and_vae_changes_no_result(qwen_folder, tmp_path, to_disk):
    spec = {"components": ["text_encoder", "vae"], "offload_type": "leaf_level"}
    if to_disk:
        spec["offload_to_disk_path"] = str(tmp_path)
    backbone = load_backbone(qwen_folder, fast_vae=False, memory={"group_offload": spec})
    offloaded = {
        n for n, m in backbone.pipe.components.items() if hasattr(m, "modules") and _is_group_offload_enabled(m)
    }
    assert offloaded == {"text_encoder", "vae"}
    if to_disk:
        assert list(tmp_path.glob("group_*.safetensors"))
    plain = load_backbone(qwen_folder, fast_vae=False)
    torch.testing.assert_close(velocity_at(backbone), velocity_at(plain), rtol=0, atol=1e-5)
    x = plain.initial_latents([3], 64, 64)
    torch.testing.assert_close(backbone.decode(x), plain.decode(x), rtol=0, atol=1e-5)
    assert backbone.on_disk == (("text_encoder", "vae") if to_disk else ())
    backbone.save(tmp_path / "saved")
    again = load_backbone(tmp_path / "saved", fast_vae=False)
    assert torch.equal(velocity_at(again), velocity_at(plain)) and torch.equal(again.decode(x), plain.decode(x))
    assert _is_group_offload_enabled(backbone.pipe.vae)
    if to_disk:
        with pytest.raises(RuntimeError, match="text_encoder are offloaded to disk, so that encodings cannot be told"):
            encoding_fingerprint(backbone, PROMPTS, None)


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ({"components": ["transformer"]}, "gradients can be silently wrong"),
        ({}, r"components=\[\] must name some of"),
        ({"components": ["vea"]}, r"components=\['vea'\] must name some of"),
        ({"components": "vae"}, r"components=vae must name some of"),
        ({"components": ["vae"], "offload_type": "leaf"}, r"memory\.group_offload: .*leaf"),
        ({"components": ["vae"], "blocks": 1}, r"memory\.group_offload: .*'blocks'"),
    ],
)
def test_group_offload_that_cannot_be_meant_is_named(qwen_folder, spec, named):
    with pytest.raises(ValueError, match=named):
        load_backbone(qwen_folder, memory={"group_offload": spec})


def test_an_offloaded_transformer_would_get_wrong_gradients(qwen_folder, tmp_path):
    """Why that is refused: after the forward pass the weights' memory holds something else."""

    def gradients(offload):
        backbone = load_backbone(qwen_folder)
        torch.manual_seed(0)
        backbone.add_lora(rank=2)
        for parameter in backbone.trainable_parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        if offload:
            place = {"onload_device": torch.device("cpu"), "offload_to_disk_path": str(tmp_path)}
            backbone.transformer.enable_group_offload(offload_type="leaf_level", **place)
        velocity = velocity_at(backbone)
        # What was freed may be reused at any time; here it is.
        scratch = [torch.full_like(p, 1e3) for p in backbone.transformer.parameters()]
        velocity.square().mean().backward()
        return torch.cat([p.grad.flatten() for p in backbone.trainable_parameters()]), scratch

    right, wrong = gradients(False)[0], gradients(True)[0]
    assert not torch.allclose(right, wrong, rtol=0.1, atol=1e-3)


def test_vae_levers_are_those_of_the_vae(qwen_folder):
    tiles = {"tile_sample_min_height": 64, "tile_sample_stride_height": 48}
    vae = load_backbone(qwen_folder, memory={"vae_slicing": True, "vae_tiling": tiles}).vae
    assert vae.use_slicing and vae.use_tiling and vae.tile_sample_stride_height == 48
    assert load_backbone(qwen_folder, memory={"vae_tiling": True}).vae.use_tiling
    with pytest.raises(ValueError, match=r"memory\.vae_tiling=\{'tile': 1\}: .*'tile'"):
        load_backbone(qwen_folder, memory={"vae_tiling": {"tile": 1}})


def test_the_attention_backend_is_set_on_the_transformer(qwen_folder, calls):
    backbone = load_backbone(qwen_folder)
    reference = velocity_at(backbone)
    try:
        memory.apply_memory_levers(backbone, {"attention_backend": "_native_math"})
        assert backbone.transformer.transformer_blocks[0].attn.processor._attention_backend == "_native_math"
        torch.testing.assert_close(velocity_at(backbone), reference, rtol=0, atol=1e-5)
        with pytest.raises(ValueError, match=r"memory\.attention_backend='flesh': .*one of the following: .*native"):
            memory.apply_memory_levers(backbone, {"attention_backend": "flesh"})
        with pytest.raises(ValueError, match="download a kernel from the hub and run it.*use 'flash'"):
            memory.apply_memory_levers(backbone, {"attention_backend": "flash_hub"})
    finally:
        # The library also sets it for every other model of the process.
        backbone.transformer.set_attention_backend("native")


@pytest.mark.slow
def test_compiled_blocks_give_the_same_gradients(qwen_folder):
    """With the eager backend, which traces the blocks but generates no code; that would take half a minute."""

    def gradients(memory):
        backbone = load_backbone(qwen_folder, memory=memory)
        torch.manual_seed(0)
        backbone.add_lora(rank=2)
        for parameter in backbone.trainable_parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        backbone.velocity(x, 0.6, cond).square().mean().backward()
        return [p.grad for p in backbone.trainable_parameters()]

    plain = load_backbone(qwen_folder)
    x, cond = plain.initial_latents([1], 64, 64), plain.encode(PROMPTS[:1])
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    compiled = gradients({"compile_repeated_blocks": {"backend": "eager"}})
    assert counters["stats"]["unique_graphs"] >= 1
    for ours, theirs in zip(compiled, gradients(None), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_repeated_blocks_are_compiled_with_the_arguments_given(qwen_folder, calls):
    backbone = load_backbone(qwen_folder)
    seen = calls(type(backbone.transformer.transformer_blocks[0]), "compile")
    memory.apply_memory_levers(backbone, {"compile_repeated_blocks": {"mode": "max-autotune"}})
    memory.apply_memory_levers(backbone, {"compile_repeated_blocks": True})
    assert [kwargs for _, kwargs in seen] == 2 * [{"mode": "max-autotune"}] + 2 * [{}]


def test_context_parallelism_goes_through_the_models_own_plan(qwen_folder, calls, monkeypatch):
    """Not run: it needs several accelerators. What is checked is the call."""
    backbone = load_backbone(qwen_folder)
    with pytest.raises(ValueError, match=r"memory\.context_parallel=.*torch\.distributed must be available"):
        memory.apply_memory_levers(backbone, {"context_parallel": {"ulysses_degree": 2}})
    with pytest.raises(ValueError, match=r"memory\.context_parallel=.*'degree'"):
        memory.apply_memory_levers(backbone, {"context_parallel": {"degree": 2}})
    seen = calls(type(backbone.transformer), "enable_parallelism")
    memory.apply_memory_levers(backbone, {"context_parallel": {"ulysses_degree": 2}})
    assert seen[0][1]["config"].ulysses_degree == 2
    monkeypatch.setattr(type(backbone.transformer), "_cp_plan", None)
    with pytest.raises(ValueError, match="diffusers has no plan for QwenImageTransformer2DModel"):
        memory.apply_memory_levers(backbone, {"context_parallel": {"ulysses_degree": 2}})


def test_forward_batch_bounds_the_networks_batch_only_without_gradients(qwen_folder):
    backbone = load_backbone(qwen_folder, guidance=4.0, memory={"forward_batch": 2})
    sizes = []
    backbone.transformer.register_forward_hook(
        lambda module, args, kwargs, out: sizes.append(len(out[0])), with_kwargs=True
    )
    x, sigma = backbone.initial_latents(range(5), 64, 64), torch.linspace(0.2, 0.9, 5)
    cond = backbone.encode(["a cat", "two red dogs", "three", "a bowl on a bench", "green"])
    negative = backbone.encode([" "] * 5)
    with torch.no_grad():
        parts = backbone.velocity(x, sigma, cond, negative)
    assert sizes == [2, 2, 2, 2, 1, 1]
    whole = backbone.velocity(x, sigma, cond, negative)
    assert sizes[6:] == [5, 5]
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-5)


def test_freed_text_encoders_are_gone_named_and_saved_all_the_same(qwen_folder, tmp_path):
    backbone = load_backbone(qwen_folder)
    cond = backbone.encode(PROMPTS)
    assert free_text_encoders(backbone) == ["text_encoder"] and free_text_encoders(backbone) == []
    assert backbone.pipe.text_encoder is None
    with pytest.raises(RuntimeError, match=r"text_encoder were freed; encode all prompts"):
        backbone.encode(PROMPTS)
    assert backbone.velocity(backbone.initial_latents([1, 2], 64, 64), 0.5, cond).isfinite().all()

    backbone.train_weights(keep_reference=False)
    with torch.no_grad():
        backbone.trainable_parameters()[0].add_(1)
    backbone.save(tmp_path)
    assert backbone.pipe.text_encoder is None
    again = load_backbone(tmp_path)
    assert torch.equal(again.encode(PROMPTS)["embeds"], cond["embeds"])
    assert torch.equal(next(again.transformer.parameters()), backbone.trainable_parameters()[0])


def test_text_encoders_that_cannot_be_read_again_are_named(tmp_path):
    backbone = load_backbone(qwen_image_pipeline())
    free_text_encoders(backbone)
    with pytest.raises(
        RuntimeError, match="text_encoder were freed or offloaded to disk and cannot be read again from None"
    ):
        backbone.save(tmp_path)


def test_the_accelerators_cache_is_emptied_with_the_text_encoders(qwen_folder, calls, monkeypatch):
    emptied = []
    monkeypatch.setattr(
        torch, "get_device_module", lambda device: SimpleNamespace(empty_cache=lambda: emptied.append(1))
    )
    backbone = load_backbone(qwen_folder)
    backbone.device = torch.device("cuda")
    free_text_encoders(backbone)
    assert emptied


def test_the_frozen_copy_shares_what_is_not_trained(qwen_folder):
    backbone = load_backbone(qwen_folder)
    backbone.train_weights(keep_reference=True, only=["txt_mlp"])
    trained = {id(p) for p in backbone.trainable_parameters()}
    for ours, theirs in zip(backbone.transformer.parameters(), backbone._frozen_copy.parameters(), strict=True):
        assert (ours is theirs) == (id(ours) not in trained) and not theirs.requires_grad
