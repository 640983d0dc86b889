"""Measure when along its trajectory a model fixes the facts of an image, and which SDE windows follow.

- ``python examples/measure_window.py`` measures the miniature and prints when each skill settles;
- ``python examples/measure_window.py rollout.steps=10 prompts.measured=128 picture=structure.png`` in ten steps, on
  more prompts, with the picture where it is wanted;
- ``python examples/measure_window.py backbone=qwen_image_2512 judge=DIR_OR_ID`` measures a recipe's model.

Settings are those of ``config/train_cast.yaml``. ``train_cast.py window=measured`` with the same model, judge and steps
finds what was measured. Profile and picture land in ``runs/measure_window/<time>``.
"""

import shutil
from pathlib import Path

import hydra
from omegaconf import DictConfig

from cast_rl.backbones import load_backbone
from cast_rl.judges import load_judge
from cast_rl.prompts import load_prompts
from cast_rl.settings import check_measured
from cast_rl.window.measured import measured_window


@hydra.main(config_path="config", config_name="measure_window", version_base="1.3")
def main(cfg: DictConfig) -> None:
    folder = Path(hydra.core.hydra_config.HydraConfig.get().runtime.output_dir)
    check_measured(cfg)
    options = {"dtype": cfg.model.dtype, "device": cfg.device, "guidance": cfg.model.guidance, **cfg.model.options}
    backbone = load_backbone(cfg.model.source, memory=cfg.memory, **options)
    size = {"height": cfg.model.height, "width": cfg.model.width, "steps": cfg.rollout.steps}
    noise = {"transition": cfg.rollout.transition, "a": cfg.rollout.noise}
    probes = load_prompts(cfg.prompts.source, cfg.prompts.measured, seed=cfg.measured.seed, held_out=False)
    settings = {**size, **noise, **cfg.measured, "negative_prompt": cfg.model.negative_prompt}
    precision = {"dtype": cfg.judge_dtype, "quantization": cfg.judge_quantization}
    judging = {"device": cfg.judge_device or cfg.device, **precision}
    measured_window(backbone, load_judge(cfg.judge, **judging), probes, folder, **settings)
    if cfg.picture is not None:
        shutil.copyfile(folder / "structure.png", cfg.picture)
    print(f"profile and picture: {folder}")


if __name__ == "__main__":
    main()
