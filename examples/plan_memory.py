"""What a recipe of ``config/backbone`` needs in memory, and how it fits 1x24, 1x80, 1x140 and 8x80 GB.

- ``python examples/plan_memory.py all`` prints it for every recipe, in seconds, on any computer;
- ``python examples/plan_memory.py backbone=qwen_image_2512 model.height=512 model.width=512`` for one, with changes.

Nothing is downloaded: weights are counted, and activations traced, on the meta device (``cast_rl/memory_plan.py``), at
one transition per training pass with gradient checkpointing. None of it has been compared with a run on an accelerator.
"""

import sys
from pathlib import Path

from diffusers.utils import logging
from omegaconf import OmegaConf

from cast_rl.memory_budget import report
from cast_rl.memory_plan import needs

CONFIG = Path(__file__).parent / "config"


def plan(name: str, changes: list[str]) -> list[str]:
    """The report on one recipe, with settings such as ``model.height=512`` changed."""
    recipe = OmegaConf.load(CONFIG / "backbone" / f"{name}.yaml")
    OmegaConf.set_struct(recipe, True)
    recipe = OmegaConf.to_container(OmegaConf.merge(recipe, OmegaConf.from_dotlist(changes)))
    architectures = OmegaConf.to_container(OmegaConf.load(CONFIG / "architectures.yaml"))
    counted = needs(recipe, architectures[name], architectures["judges"]["qwen3_vl_8b"])
    return report(counted, ema=recipe["optim"]["ema"] is not None)


def main(arguments: list[str]) -> None:
    logging.set_verbosity_error()
    recipes = sorted(path.stem for path in (CONFIG / "backbone").glob("*.yaml"))
    first, changes = (arguments[0], arguments[1:]) if arguments else ("", [])
    names = recipes if first == "all" else [first.removeprefix("backbone=")]
    if not set(names) <= set(recipes):
        sys.exit(f"usage: plan_memory.py all | backbone=NAME [key=value ...]; the names are {', '.join(recipes)}")
    for name in names:
        print(f"{name}\n  " + "\n  ".join(plan(name, changes)))


if __name__ == "__main__":
    main(sys.argv[1:])
