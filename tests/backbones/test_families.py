"""What is particular to a family: guidance that is refused, text without torchvision, checkpoints without T5."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from families import CASES, PLAIN, PROMPTS, stock_images
from tiny_families import flux, flux2_klein
from transformers.processing_utils import ProcessorMixin

from cast_rl.backbones import FAMILIES, Backbone, load_backbone
from cast_rl.backbones import flux2 as flux2_module
from cast_rl.fingerprint import encoding_fingerprint

PAGE = Path(__file__).parents[2] / "docs" / "adding_a_family.md"


def test_guidance_that_the_network_takes_as_an_input_must_be_given(shared_stock):
    for pipeline_class in ("Flux2Pipeline", "FluxPipeline"):
        with pytest.raises(ValueError, match=r"input of the network, and guidance=None .* guidance=3\.5"):
            load_backbone(shared_stock(pipeline_class))


def test_guidance_is_refused_by_distilled_models():
    schnell = flux(guidance_embeds=False)
    with pytest.raises(ValueError, match=r"FLUX\.1 is distilled .*guidance=3\.5 would be ignored"):
        load_backbone(schnell, guidance=3.5)
    backbone = load_backbone(schnell, max_sequence_length=16)
    cond = backbone.encode(["a cat"])
    assert backbone.velocity(backbone.initial_latents([0], 64, 64), 0.5, cond).isfinite().all()

    klein = flux2_klein(is_distilled=True)
    with pytest.raises(ValueError, match=r"klein is distilled .*guidance=4\.0 would be ignored"):
        load_backbone(klein, guidance=4.0)
    assert not load_backbone(klein, guidance=1.0).uses_negative


def test_flux_names_the_option_that_asks_for_a_negative_prompt(shared_stock):
    backbone = load_backbone(shared_stock("FluxPipeline"), guidance=3.5, true_cfg_scale=2.0, max_sequence_length=16)
    cond, x = backbone.encode(["a cat"]), backbone.initial_latents([0], 64, 64)
    with pytest.raises(ValueError, match=r"true_cfg_scale=2\.0 needs a negative .* true_cfg_scale=None"):
        backbone.velocity(x, 0.5, cond)
    backbone.true_cfg_scale = None
    with pytest.raises(ValueError, match="true_cfg_scale=None does not use one"):
        backbone.velocity(x, 0.5, cond, cond)


def test_flux2_reads_text_without_torchvision(tiny_folder, shared_stock, tmp_path, monkeypatch):
    """The released index names an image-and-text processor, which cannot be built without torchvision."""
    folder = tmp_path / "flux2"
    shutil.copytree(tiny_folder("Flux2Pipeline"), folder)
    index = json.loads((folder / "model_index.json").read_text())
    index["tokenizer"] = ["transformers", "PixtralProcessor"]
    (folder / "model_index.json").write_text(json.dumps(index))
    monkeypatch.setattr(flux2_module, "is_torchvision_available", lambda: False)
    options = PLAIN["Flux2Pipeline"]
    backbone = load_backbone(folder, **options)
    expected, _ = shared_stock("Flux2Pipeline").encode_prompt(PROMPTS, max_sequence_length=64)
    assert torch.equal(backbone.encode(PROMPTS)["embeds"], expected)


def test_a_processor_and_its_tokenizer_give_flux2_the_same_tokens(shared_stock, load_stock):
    class Processor(ProcessorMixin):
        """As PixtralProcessor, less the images."""

        def __init__(self, tokenizer=None, chat_template=None):
            super().__init__(tokenizer, chat_template=chat_template)

    pipe = shared_stock("Flux2Pipeline")
    encode, tokenizer = pipe._get_mistral_3_small_prompt_embeds, pipe.tokenizer
    processor = Processor(tokenizer, chat_template=tokenizer.chat_template)
    for length in (24, 64):  # the first cuts the prompts off
        ours, theirs = (
            encode(pipe.text_encoder, t, PROMPTS, max_sequence_length=length) for t in (tokenizer, processor)
        )
        assert torch.equal(ours, theirs)
    processed = load_stock("Flux2Pipeline")
    processed.register_modules(tokenizer=processor)
    backbone = load_backbone(processed, **PLAIN["Flux2Pipeline"])
    assert len(encoding_fingerprint(backbone, PROMPTS, None)) == 64
    with pytest.warns(UserWarning, match="keeps 64 of the"):
        backbone.encode(["a cat " * 60])


def test_stable_diffusion_3_may_come_without_t5(load_stock):
    pipe = load_stock("StableDiffusion3Pipeline")
    pipe.text_encoder_3 = pipe.tokenizer_3 = None
    backbone = load_backbone(pipe)
    assert backbone.encode(["a cat"])["embeds"].shape[:2] == (1, 77 + 256)
    with pytest.warns(UserWarning, match=r"^CLIP keeps 77 of the \d+ tokens of .*; shorten it"):
        backbone.encode(["a red cat " * 20])


def test_stable_diffusion_3_may_shift_with_the_size(load_stock):
    pipe = load_stock("StableDiffusion3Pipeline")
    pipe.scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, max_shift=2.0)
    case = next(case for case in CASES if case.pipeline_class == "StableDiffusion3Pipeline")
    backbone = load_backbone(pipe, **case.load_options())
    stock_images(pipe, case, (64, 96), 2)
    assert torch.equal(backbone.sigmas(2, 64, 96), pipe.scheduler.sigmas)
    assert not torch.equal(backbone.sigmas(2, 128, 96), pipe.scheduler.sigmas)


@pytest.mark.parametrize("pipeline_class", FAMILIES)
def test_the_text_length_is_the_pipelines_and_the_callers_prompts_stay(shared_stock, pipeline_class):
    case = next(case for case in CASES if case.pipeline_class == pipeline_class)
    stock = shared_stock(pipeline_class)
    backbone = load_backbone(stock, **(case.load_options() | {"max_sequence_length": None}))
    assert backbone.max_sequence_length == (256 if pipeline_class == "StableDiffusion3Pipeline" else 512)
    backbone = load_backbone(stock, **case.load_options())
    prompts = list(PROMPTS)
    backbone.encode(prompts)
    assert prompts == PROMPTS
    with pytest.raises(ValueError, match="max_sequence_length must be at least 1"):
        load_backbone(stock, **(case.load_options() | {"max_sequence_length": 0}))


@pytest.mark.parametrize("pipeline_class", [name for name, family in FAMILIES.items() if family.longest_text])
def test_texts_longer_than_the_pipeline_takes_are_refused(shared_stock, pipeline_class):
    stock, longest = shared_stock(pipeline_class), FAMILIES[pipeline_class].longest_text
    with pytest.raises(ValueError, match=f"cannot be greater than {longest} but is {longest + 1}"):
        stock("a cat", height=64, width=64, max_sequence_length=longest + 1)
    options = PLAIN[pipeline_class]
    with pytest.raises(ValueError, match=rf"max_sequence_length={longest + 1} is more than .* give at most {longest}"):
        load_backbone(stock, **(options | {"max_sequence_length": longest + 1}))
    assert load_backbone(stock, **(options | {"max_sequence_length": longest})).max_sequence_length == longest


def test_the_grid_is_the_latents_own(shared_stock):
    flux2 = load_backbone(shared_stock("Flux2Pipeline"), guidance=1.0)
    assert flux2.latent_shape(64, 96) == (16, 4, 6)
    sd3 = load_backbone(shared_stock("StableDiffusion3Pipeline"))
    assert sd3.latent_shape(64, 96) == (4, 8, 12)
    with pytest.raises(ValueError, match=r"width=72 does not fit FLUX\.2: .* multiple of 16 pixels"):
        flux2.latent_grid(64, 72)


def test_the_page_about_adding_a_family_is_short_and_names_all_there_is_to_write():
    page = PAGE.read_text()
    assert len(page.splitlines()) <= 60
    named = set(re.findall(r"`(\w+)", page)) | {"family", "pipeline_classes"}
    assert named >= Backbone.__abstractmethods__ | {"reads_padding", "own_components", "guidance_setting"}
    for file in re.findall(r"`((?:cast_rl|tests)/[\w/]+\.py)`", page):
        assert (PAGE.parents[1] / file).is_file(), file
