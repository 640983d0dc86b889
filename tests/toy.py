"""A toy backbone over spatial latents, quick enough to roll out in milliseconds."""

from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchrl.envs import TransformedEnv

from cast_rl.envs import AtomRewardTransform, DenoisingEnv
from cast_rl.judges.base import Judgement
from cast_rl.policy import make_policy

GRID = (4, 4)
SHAPE = (3, *GRID)
NUM_PROMPTS = 5


class ToyTransformer(nn.Module):
    """Two convolutions over latents, sigma and the prompt's embedding, with an adapter to switch off."""

    def __init__(self, channels: int = 3, width: int = 8, hidden: int = 16):
        super().__init__()
        self.inner = nn.Conv2d(channels + 1, hidden, 3, padding=1)
        self.cond = nn.Linear(width, hidden)
        self.outer = nn.Conv2d(hidden, channels, 3, padding=1)
        self.adapter = nn.Parameter(torch.zeros(channels, hidden))
        self.adapter_on = True
        self.evaluated_rows: list[int] = []

    def forward(self, x: Tensor, sigma: Tensor, embeds: Tensor) -> Tensor:
        self.evaluated_rows.append(len(x))
        time = sigma.reshape(-1, 1, 1, 1).expand(len(x), 1, *x.shape[-2:]).to(x.dtype)
        hidden = torch.tanh(self.inner(torch.cat([x, time], 1)) + self.cond(embeds.mean(1))[:, :, None, None])
        out = self.outer(hidden)
        if self.adapter_on:
            out = out + torch.einsum("bihw,ci->bchw", hidden, self.adapter.to(hidden.dtype))
        return out


class ToyBackbone:
    """Follows the backbone protocol; weights are a function of ``seed``, and compute runs in ``dtype``."""

    def __init__(self, dtype: torch.dtype = torch.float32, seed: int = 0):
        self.dtype, self.device = dtype, torch.device("cpu")
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.transformer = ToyTransformer(SHAPE[0]).to(dtype)
            self.projection = torch.randn(3, SHAPE[0]) * 0.5

    def velocity(self, x: Tensor, sigma: Tensor, cond: dict, negative: dict | None = None) -> Tensor:
        return self.transformer(x.to(self.dtype), sigma, cond["embeds"].to(self.dtype)).float()

    @torch.no_grad()
    def decode(self, x: Tensor) -> Tensor:
        image = torch.einsum("oc,bchw->bohw", self.projection, x).sigmoid()
        return nn.functional.interpolate(image, scale_factor=2)

    def latent_shape(self, height: int, width: int) -> tuple[int, int, int]:
        return SHAPE[0], height // 2, width // 2

    def initial_latents(self, seeds: list[int], height: int, width: int) -> Tensor:
        shape = self.latent_shape(height, width)
        return torch.stack([torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds])

    def sigmas(self, steps: int, height: int, width: int) -> Tensor:
        linear = torch.linspace(1, 0, steps + 1)
        return 2 * linear / (1 + linear)

    @contextmanager
    def reference(self):
        self.transformer.adapter_on = False
        try:
            yield
        finally:
            self.transformer.adapter_on = True


class ToyBank(nn.Module):
    """``prompt_id -> ({embeds (B, 2, 8)}, None)``."""

    def __init__(self):
        super().__init__()
        self._table = torch.randn(NUM_PROMPTS, 2, 8, generator=torch.Generator().manual_seed(1))

    def forward(self, prompt_id: Tensor) -> tuple[dict, None]:
        return {"embeds": self._table[prompt_id.reshape(-1)]}, None


def toy_policy(backbone: ToyBackbone, steps: int = 6, **options):
    """The policy over the toy's own schedule; its transition must agree with the environment's."""
    return make_policy(backbone, ToyBank(), backbone.sigmas(steps, 8, 8), **options)


@dataclass(frozen=True)
class ToyPrompt:
    """A prompt of ``n`` atoms; an atom is a channel and a half of the image that must be bright."""

    atoms: tuple


PROMPTS = [ToyPrompt(tuple((k % 3, k % 2) for k in range(n))) for n in (2, 3, 1, 4, 2)]


class ToyJudge:
    """Scores an atom by its channel's brightness in its half, the evidence; keeps count of its images."""

    def __init__(self):
        self.calls: list[int] = []

    def __call__(self, images: Tensor, atoms: list[list]) -> Judgement:
        self.calls.append(len(images))
        most = max(len(row) for row in atoms)
        scores = torch.zeros(len(images), most)
        mask = torch.zeros(len(images), most, dtype=torch.bool)
        evidence = torch.zeros(len(images), most, *images.shape[-2:])
        middle = images.shape[-1] // 2
        for b, row in enumerate(atoms):
            for k, (channel, half) in enumerate(row):
                part = slice(0, middle) if half == 0 else slice(middle, None)
                scores[b, k] = images[b, channel, :, part].mean()
                mask[b, k] = True
                evidence[b, k, :, part] = 1
        return Judgement(scores, mask, evidence)


def toy_env(backbone: ToyBackbone | None = None, **options):
    """A small `DenoisingEnv` of 6 steps, 2 prompts x 4 images and the window (1, 3) unless told otherwise."""
    options = {"prompts_per_batch": 2, "group_size": 4, "window": (1, 3), "steps": 6} | options
    return DenoisingEnv.from_backbone(backbone or ToyBackbone(), NUM_PROMPTS, height=8, width=8, **options)


def toy_training_env(backbone: ToyBackbone | None = None, judge: ToyJudge | None = None, **options):
    """`toy_env` with the toy's per-atom reward."""
    reward = AtomRewardTransform(judge or ToyJudge(), PROMPTS, grid=GRID)
    return TransformedEnv(toy_env(backbone, **options), reward)
