"""A judge whose weights are quantized while they are loaded, by the library that its settings name."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from tiny_judges import save_judge
from transformers import BitsAndBytesConfig, Qwen3VLForConditionalGeneration

from cast_rl.judges import load_judge

CONFIG = Path(__file__).parents[2] / "examples" / "config" / "judge_quantization"
NF4 = OmegaConf.to_container(OmegaConf.load(CONFIG / "nf4.yaml"))
PACKAGES = {"nf4": "bitsandbytes", "int8": "torchao"}


@pytest.mark.parametrize("name", PACKAGES)
def test_a_quantized_judge_judges_nearly_alike(tmp_path, images, atoms, name):
    if importlib.util.find_spec(PACKAGES[name]) is None:
        pytest.skip(f"{PACKAGES[name]} is not installed")
    # 4-bit weights come in blocks of 64, which must fill every row.
    folder = save_judge("qwen3_vl", tmp_path, hidden=64, hidden_size=64, intermediate_size=128)
    plain = load_judge(folder, dtype="bfloat16")
    quantized = load_judge(folder, dtype="bfloat16", quantization=OmegaConf.load(CONFIG / f"{name}.yaml"))
    model = quantized.family.model
    assert quantized.device.type == "cpu" and not any(p.requires_grad for p in model.parameters())
    ours, exact = quantized(images, atoms), plain(images, atoms)
    assert quantized.identity()["weights"] != plain.identity()["weights"]
    gap = (ours.scores - exact.scores).abs()
    # Random weights in 4 bits are another model for some atoms, though not for most of them.
    assert 0 < gap.mean() < 0.5 * exact.scores.std()
    assert torch.equal(ours.mask, exact.mask)


def test_the_config_reaches_from_pretrained_on_the_judges_device_and_must_have_an_effect(judge_folders, monkeypatch):
    given, load = {}, Qwen3VLForConditionalGeneration.from_pretrained

    def from_pretrained(path, quantization_config, device_map, **options):
        given.update(config=quantization_config, device=device_map)
        return load(path, **options)

    monkeypatch.setattr(Qwen3VLForConditionalGeneration, "from_pretrained", from_pretrained)
    with pytest.raises(ValueError, match=r"quantization=.*left Qwen3VLForConditionalGeneration as it was"):
        load_judge(judge_folders("qwen3_vl"), quantization=NF4)
    assert type(given["config"]) is BitsAndBytesConfig and given["device"] == torch.device("cpu")
    assert given["config"].load_in_4bit and given["config"].bnb_4bit_compute_dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("nf4", r"load_judge: quantization\.backend='nf4' is none of transformers: .*bitsandbytes_4bit"),
        ({"load_in_4bit": True}, r"load_judge: quantization\.backend=None is none of transformers"),
        (NF4 | {"backend": "bits"}, r"load_judge: quantization\.backend='bits'.*torchao"),
        (NF4 | {"bnb_quant_type": 1}, r"load_judge: quantization\.bnb_quant_type.*mean bnb_4bit_quant_type"),
        (NF4 | {"load_in_8bit": True}, "quantization: backend bitsandbytes_4bit needs load_in_4bit: true and no other"),
        (NF4 | {"backend": "bitsandbytes_8bit"}, r"bitsandbytes_8bit needs load_in_8bit: true .*'load_in_4bit'"),
        ({"backend": "bitsandbytes_8bit"}, "got neither"),
        ({"backend": ["a"]}, r"backend=\['a'\] is none of"),
        (NF4 | {"bnb_4bit_compute_dtype": "bfloat17"}, "load_judge: quantization: .*bfloat17"),
    ],
)
def test_quantization_that_cannot_be_meant_is_named(judge_folders, spec, named):
    with pytest.raises(ValueError, match=named):
        load_judge(judge_folders("qwen3_vl"), quantization=spec)


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed")
def test_a_package_that_is_missing_is_named(judge_folders):
    with pytest.raises(ImportError, match="requires bitsandbytes: `pip install"):
        load_judge(judge_folders("qwen3_vl"), quantization=NF4)


def test_what_is_quantized_already_or_no_model_is_refused(judge_folders, tmp_path):
    folder = Path(shutil.copytree(judge_folders("qwen3_vl"), tmp_path / "judge"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "bitsandbytes"}}))
    with pytest.raises(ValueError, match="is quantized already; leave the setting out"):
        load_judge(folder, quantization=NF4)
    with pytest.raises(ValueError, match="quantization is for models, and 'oracle' is none"):
        load_judge("oracle", quantization=NF4)
