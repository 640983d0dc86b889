"""What cannot be loaded is refused before any weights are read, with the way out."""

import json
import shutil

import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler, FluxImg2ImgPipeline

from cast_rl.backbones import FAMILIES, load_backbone


def with_index(folder, target, **changes):
    shutil.copytree(folder, target)
    path = target / "model_index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return target


def test_a_pipeline_object_and_its_folder_give_the_same_backbone(qwen_folder, qwen_pipe):
    from_folder, from_object = load_backbone(qwen_folder), load_backbone(qwen_pipe)
    assert from_object.pipe is qwen_pipe
    assert type(from_object) is type(from_folder) is FAMILIES["QwenImagePipeline"]
    cond = from_folder.encode(["a cat"])
    x = from_folder.initial_latents([0], 64, 64)
    assert torch.equal(from_folder.velocity(x, 0.5, cond), from_object.velocity(x, 0.5, cond))


def test_the_miniature_is_loaded_by_name():
    backbone = load_backbone("miniature")
    assert isinstance(backbone, FAMILIES["QwenImagePipeline"]) and backbone.latent_grid(48, 48) == (12, 12)


def test_latents_from_elsewhere_are_decoded_on_the_backbone_s_device(qwen_folder, monkeypatch):
    """An environment on the CPU may hand its latents to a decoder on a GPU."""
    backbone, seen = load_backbone(qwen_folder), []
    monkeypatch.setattr(backbone, "device", torch.device("meta"))
    monkeypatch.setattr(backbone, "_decode", lambda x: seen.append(x.device.type) or torch.zeros(len(x), 3, 64, 64))
    assert backbone.decode(torch.zeros(1, 4, 8, 8)).shape == (1, 3, 64, 64)
    assert seen == ["meta"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16"])
def test_every_component_takes_the_dtype(qwen_folder, qwen_pipe, dtype):
    for source in (qwen_folder, qwen_pipe):
        backbone = load_backbone(source, dtype=dtype)
        assert backbone.dtype == backbone.vae.dtype == backbone.pipe.text_encoder.dtype == torch.bfloat16
        cond = backbone.encode(["a cat"])
        assert cond["embeds"].dtype == torch.bfloat16
        assert backbone.velocity(backbone.initial_latents([0], 64, 64), 0.5, cond).dtype == torch.float32


def test_an_unsupported_class_names_the_supported_ones_and_the_file_to_read(qwen_folder, tmp_path):
    expected = (
        "'SomePipeline'; supported: Flux2Pipeline, .*ZImagePipeline.* read cast_rl/backbones/stable_diffusion_3.py"
    )
    with pytest.raises(ValueError, match=expected):
        load_backbone(with_index(qwen_folder, tmp_path / "other", _class_name="SomePipeline"))
    with pytest.raises(ValueError, match=r"'FluxImg2ImgPipeline'; supported"):
        load_backbone(FluxImg2ImgPipeline.__new__(FluxImg2ImgPipeline))


def test_code_that_comes_with_a_checkpoint_is_not_run(qwen_folder, tmp_path):
    folder = with_index(qwen_folder, tmp_path / "custom", transformer=["my_transformer", "MyTransformer"])
    (folder / "transformer" / "my_transformer.py").write_text("raise SystemExit('this code ran')")
    with pytest.raises(ValueError, match="'transformer' .* MyTransformer from 'my_transformer'"):
        load_backbone(folder)
    folder = with_index(qwen_folder, tmp_path / "pipeline", _class_name=["my_pipeline", "MyPipeline"])
    (folder / "my_pipeline.py").write_text("raise SystemExit('this code ran')")
    with pytest.raises(ValueError, match="no backbone for the pipeline class"):
        load_backbone(folder)


def test_pickled_weights_are_not_read(qwen_folder, tmp_path):
    folder = tmp_path / "pickled"
    shutil.copytree(qwen_folder, folder)
    weights = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    weights.rename(weights.with_suffix(".bin"))
    with pytest.raises(OSError, match="safetensors"):
        load_backbone(folder)


def test_paths_that_hold_no_pipeline_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no model_index\.json"):
        load_backbone(tmp_path)
    file = tmp_path / "weights.safetensors"
    file.touch()
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        load_backbone(file)
    with pytest.raises(FileNotFoundError, match="is no folder here"):
        load_backbone(tmp_path / "missing")
    with pytest.raises(FileNotFoundError, match="'no/such-model' is no folder here .* from the hub"):
        load_backbone("no/such-model")


def test_options_that_do_not_exist_are_errors(qwen_folder):
    with pytest.raises(TypeError, match="fast_vaee"):
        load_backbone(qwen_folder, fast_vaee=True)
    for dtype in ("int8", "float31", torch.int64):
        with pytest.raises(ValueError, match="not a floating point type"):
            load_backbone(qwen_folder, dtype=dtype)
    with pytest.raises(ValueError, match="decode_batch must be at least 1"):
        load_backbone(qwen_folder, decode_batch=0)


def test_schedulers_that_are_not_euler_flows_are_refused(qwen_pipe):
    qwen_pipe.scheduler = DDIMScheduler()
    with pytest.raises(ValueError, match="scheduler is DDIMScheduler"):
        load_backbone(qwen_pipe)
    qwen_pipe.scheduler = FlowMatchEulerDiscreteScheduler(stochastic_sampling=True)
    with pytest.raises(ValueError, match="stochastic_sampling=True"):
        load_backbone(qwen_pipe)
