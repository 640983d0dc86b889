"""From a name or a folder to a judge, and what is refused on the way."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from cast_rl.judges import EvidenceSettings, Judge, VLMJudge, load_judge
from cast_rl.judges.families.qwen_vl import PatchMatmul


@pytest.fixture
def copy(judge_folders, tmp_path):
    """A copy of a checkpoint to spoil."""
    return shutil.copytree(judge_folders("qwen3_vl"), tmp_path / "judge")


def edit(folder, name, **values):
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_names():
    assert isinstance(load_judge("oracle"), Judge)
    assert isinstance(load_judge("soft_oracle", device="meta"), Judge)
    with pytest.raises(ValueError, match="unknown judge 'orcale'.*'oracle'.*AtomRewardTransform"):
        load_judge("orcale")


def test_a_frozen_model_with_the_weights_of_the_checkpoint(judge_folders, kind):
    judge = load_judge(judge_folders(kind), dtype="bfloat16")
    assert isinstance(judge, VLMJudge) and isinstance(judge, Judge)
    model = judge.family.model
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    assert model.dtype == torch.bfloat16 and judge.device.type == "cpu"
    saved = load_file(judge_folders(kind) / "model.safetensors")
    own = model.state_dict()
    assert isinstance(model.model.visual.patch_embed, PatchMatmul)
    embed = "visual.patch_embed.proj.weight"
    (name,) = (key for key in saved if key.endswith(embed))
    assert torch.equal(own[f"model.{embed}"], saved[name].bfloat16())


def test_a_calibration_is_read(copy, tmp_path):
    assert load_judge(copy).evidence == EvidenceSettings()
    settings = EvidenceSettings(heads=((1, 0), (2, 3)), query="predict", relative=True)
    settings.save(copy / "cast_judge.json")
    assert load_judge(copy).evidence == settings
    other = EvidenceSettings(layers=(1,))
    other.save(tmp_path / "other.json")
    assert load_judge(copy, evidence=tmp_path / "other.json").evidence == other
    assert load_judge(copy, evidence=other).evidence == other
    assert load_judge(copy, evidence=False).evidence is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "calibration"),
        ("{", "calibration"),
        ('{"layer": [1]}', "unknown key 'layer'; keys are layers, heads, query, relative"),
        ('{"heads": [1, 2]}', "calibration"),
        ('{"layers": [1], "heads": [[1, 2]]}', "not both"),
        ('{"layers": []}', "at least one"),
        ('{"query": "before"}', "query='before' is not one of self, predict"),
        ('{"heads": [[1, 9]]}', "layer 1, head 9; the model has 3 layers of 4 heads"),
        ('{"layers": [3]}', "layer 3, head 0; the model has 3 layers"),
    ],
)
def test_a_wrong_calibration_is_refused(copy, text, message):
    (copy / "cast_judge.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        load_judge(copy)


def test_other_models_are_refused(tmp_path):
    tiny = Qwen2Config(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32)
    Qwen2ForCausalLM(tiny).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="'qwen2', which is no supported judge; supported: qwen3_vl,"):
        load_judge(tmp_path)


def test_folders_without_a_model_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no config.json"):
        load_judge(tmp_path)
    with pytest.raises(FileNotFoundError, match="'nobody/nothing' is no folder here and could not be read"):
        load_judge("nobody/nothing")


def test_missing_weights_are_an_error_not_noise(copy):
    weights = load_file(copy / "model.safetensors")
    name = next(key for key in weights if "layers.1.mlp" in key)
    weights.pop(name)
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 1 weights .*layers\.1\.mlp"):
        load_judge(copy)


def test_code_that_comes_with_a_checkpoint_is_not_run(copy):
    code = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\n"
    for name in ("mine_config", "mine_model", "mine_tokenizer"):
        (copy / f"{name}.py").write_text(code)
    edit(copy, "config.json", auto_map={"AutoConfig": "mine_config.C", "AutoModelForImageTextToText": "mine_model.M"})
    edit(copy, "tokenizer_config.json", auto_map={"AutoTokenizer": ["mine_tokenizer.T", None]})
    assert isinstance(load_judge(copy), VLMJudge)
    assert not (copy / "ran").exists()


def test_pickled_weights_are_not_read(copy):
    torch.save(load_file(copy / "model.safetensors"), copy / "pytorch_model.bin")
    (copy / "model.safetensors").unlink()
    with pytest.raises(OSError, match="safetensors"):
        load_judge(copy)


def test_attention_that_takes_no_tree_mask_is_refused(judge_folders):
    with pytest.raises(ValueError, match="text attention is 'eager', which cannot take the judge's tree mask.*sdpa"):
        load_judge(judge_folders("qwen3_vl"), attention="eager")
    mixed = load_judge(judge_folders("qwen3_vl"), attention={"text_config": "sdpa", "vision_config": "eager"})
    assert mixed.family.model.config.vision_config._attn_implementation == "eager"


def test_sliding_windows_are_refused(judge_folders, tmp_path):
    folder = shutil.copytree(judge_folders("qwen2_5_vl"), tmp_path / "judge")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="use_sliding_window=False"):
        load_judge(folder)


def test_a_template_without_images_is_refused(copy):
    (copy / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}{% endfor %}")
    with pytest.raises(ValueError, match=r"must show an image as one <\|image_pad\|> before <\|vision_end\|>"):
        load_judge(copy)
    (copy / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="no chat template"):
        load_judge(copy)
