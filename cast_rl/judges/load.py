"""From a name, a folder or a hub id to a judge."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from cast_rl.judges.answers import AnswerMode
from cast_rl.judges.base import Judge
from cast_rl.judges.evidence import FILE_NAME, EvidenceSettings
from cast_rl.judges.families.base import Family
from cast_rl.judges.families.qwen2_5_vl import Qwen2_5_VL
from cast_rl.judges.families.qwen3_vl import Qwen3VL
from cast_rl.judges.images import ImageSettings
from cast_rl.judges.vlm import VLMJudge
from cast_rl.library_settings import check_quantized, model_quantization

# One entry per model type. A new family is a file in families/ and an import here.
FAMILIES: dict[str, tuple[type[PreTrainedModel], type[Family]]] = {
    model.config_class.model_type: (model, family) for family in (Qwen3VL, Qwen2_5_VL) for model in family.model_classes
}
QUANTIZATION = "load_judge: quantization"  # in messages
NAMES = "'miniature', the tiny model that ships; 'oracle', the miniature's exact judge; 'soft_oracle', an unsure one"


def load_judge(
    source: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str = torch.float32,
    answers: AnswerMode = "robust",
    evidence: EvidenceSettings | str | Path | bool = True,
    evidence_size: tuple[int, int] | None = None,
    token_budget: int = 16384,
    attention: str | dict[str, str] = "sdpa",
    quantization: Mapping[str, Any] | None = None,
) -> Judge:
    """Load a vision-language model as a judge, or one of the miniature's judges by name.

    Only safetensors and JSON are read; code that comes with a checkpoint is not run.

    Args:
        source: a folder in transformers' format, a Hugging Face hub id, or a name: ``"miniature"``, the tiny Qwen3-VL
            that comes with this package, ``"oracle"`` or ``"soft_oracle"``. The oracles compute on the CPU,
            exactly, and heed no option but refuse a quantization.
        device: where the model goes. Images are sent there.
        dtype: of the model, as ``torch.bfloat16`` or ``"bfloat16"``; ``"auto"`` for the checkpoint's own.
        answers: ``"robust"`` or ``"official"``, GenEval 2's protocol to the letter.
        evidence: the settings, or the JSON that `examples/calibrate_judge.py` wrote. True reads ``cast_judge.json``
            beside the weights, or takes the defaults if there is none; False gives scores alone.
        evidence_size, token_budget: see `cast_rl.judges.VLMJudge`.
        attention: transformers' ``attn_implementation``; the decoder must be on sdpa.
        quantization: arguments of transformers' quantization config plus ``backend``, such as ``{"backend":
            "bitsandbytes_4bit", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}``; None for none but the
            checkpoint's own.

    Raises:
        FileNotFoundError: `source` is no folder of a model, nor a hub id that can be reached.
        ValueError: an unknown name, a model that is not supported or incomplete, or settings it cannot follow.
        ImportError: the package that quantizes is not installed.
    """
    if str(source) in ("oracle", "soft_oracle") and quantization is not None:
        raise ValueError(f"{QUANTIZATION} is for models, and {source!r} is none; leave it out")
    if source == "oracle":
        # Here, not above: the miniature brings diffusers and scipy along, which other judges do without.
        from cast_rl.miniature.oracle import Oracle

        return Oracle()
    if source == "soft_oracle":
        from cast_rl.miniature.soft_oracle import SoftOracle

        return SoftOracle()
    path = _miniature() if str(source) == "miniature" else _path(source)
    config = _config(path)
    classes, family = FAMILIES[config.model_type]
    family.check(config)
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention}
    if quantization is not None:
        if getattr(config, "quantization_config", None):
            raise ValueError(f"{QUANTIZATION}: {path} is quantized already; leave the setting out")
        known = AUTO_QUANTIZATION_CONFIG_MAPPING
        options["quantization_config"] = model_quantization(QUANTIZATION, quantization, known, "transformers")
    quantized = quantization is not None or hasattr(config, "quantization_config")
    if quantized:
        # Weights are quantized where they will stay; not every library lets them be moved afterwards.
        options["device_map"] = torch.device(device)
    model, info = classes.from_pretrained(
        path, use_safetensors=True, trust_remote_code=False, output_loading_info=True, **options
    )
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"{path} lacks {len(missing)} weights of {classes.__name__}, such as {missing[0]}")
    if quantization is not None:
        check_quantized(QUANTIZATION, quantization, model)
    return VLMJudge(
        family(model if quantized else model.to(device)),
        AutoTokenizer.from_pretrained(path, trust_remote_code=False),
        ImageSettings.from_processor(Qwen2VLImageProcessorPil.from_pretrained(path)),
        answers=answers,
        evidence=_evidence(evidence, path),
        evidence_size=evidence_size,
        token_budget=token_budget,
    )


def _miniature() -> str:
    folder = Path(__file__).parents[1] / "miniature" / "weights" / "judge"
    if not folder.is_dir():
        raise FileNotFoundError(
            f"the miniature's judge is not in this installation ({folder} does not exist); train it with "
            "examples/pretrain_miniature.py judge, or use judge 'oracle'"
        )
    return str(folder)


def _path(source: str | Path) -> str:
    if not Path(source).exists() and "/" not in str(source):
        raise ValueError(
            f"unknown judge {str(source)!r}: no folder of that name is here ({Path(source).resolve()}), and a hub id "
            f"is owner/name. Known names: {NAMES}. In Python any callable with the protocol of cast_rl.judges.Judge "
            "can be given to AtomRewardTransform"
        )
    if Path(source).exists() and not (Path(source) / "config.json").is_file():
        raise FileNotFoundError(f"{source} holds no config.json; give the folder that model.save_pretrained wrote")
    return str(source)


def _config(path: str) -> PretrainedConfig:
    """The model's configuration, before any weights are fetched."""
    try:
        found, _ = PretrainedConfig.get_config_dict(path)
    except OSError as error:
        raise FileNotFoundError(
            f"load_judge: {path!r} is no folder here and could not be read from the hub; check the path, the id, and "
            "the network or the local cache"
        ) from error
    if found.get("model_type") not in FAMILIES:
        raise ValueError(
            f"{path} is a {found.get('model_type')!r}, which is no supported judge; supported: {', '.join(FAMILIES)}. "
            "To add a family, write the like of cast_rl/judges/families/qwen3_vl.py and list it in load.py"
        )
    return AutoConfig.from_pretrained(path, trust_remote_code=False)


def _evidence(given: EvidenceSettings | str | Path | bool, path: str) -> EvidenceSettings | None:
    if isinstance(given, EvidenceSettings):
        return given
    if not isinstance(given, bool):
        return EvidenceSettings.load(given)
    beside = Path(path) / FILE_NAME
    if not given:
        return None
    return EvidenceSettings.load(beside) if beside.is_file() else EvidenceSettings()
