"""Training the miniature's autoencoder on rendered scenes."""

from __future__ import annotations

import random
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLQwenImage
from torch import Tensor
from torchrl.checkpoint import Checkpoint

from cast_rl.backbones.single_frame import single_frame_vae
from cast_rl.miniature.assemble import build_vae
from cast_rl.miniature.processes import average_gradients, rank_and_world, step_bar
from cast_rl.miniature.render import layouts, render
from cast_rl.miniature.schedule import rate
from cast_rl.miniature.vocabulary import sample_graph

LEARNING_RATE = 3e-3
KL_WEIGHT = 1e-3


def scenes(n: int, rng: random.Random, g: torch.Generator) -> Tensor:
    """``n`` random images ``(n, 3, S, S)`` in [-1, 1] of one to three groups in equal parts."""
    graphs = [sample_graph(rng, groups=(1, 1, 1)) for _ in range(n)]
    return render(layouts(graphs, g), g)[0] * 2 - 1


def codec_loss(vae: AutoencoderKLQwenImage, images: Tensor) -> tuple[Tensor, Tensor]:
    """Reconstruction (L1 + 4 MSE) plus a slight KL, and the mean absolute error; ``images (B, 3, S, S)`` in [-1, 1]."""
    posterior = vae.encode(images[:, :, None]).latent_dist
    out = vae.decode(posterior.sample()).sample[:, :, 0]
    error = (out - images).abs().mean()
    kl = 0.5 * (posterior.mean.pow(2) + posterior.var - 1 - posterior.logvar).mean()
    return error + 4 * F.mse_loss(out, images) + KL_WEIGHT * kl, error.detach()


def train_codec(folder: Path, steps: int = 1100, batch: int = 32, save_every: int = 100) -> AutoencoderKLQwenImage:
    """Train, or go on training, the autoencoder; checkpoints live in ``folder``. Returns it with its statistics set.

    ``latents_mean`` and ``latents_std`` are measured per channel on 2,000 images at the end. In a ``torchrun`` group
    each process takes its share of every batch; randomness is a function of the step and the process.
    """
    rank, world = rank_and_world()
    torch.manual_seed(0)
    vae = single_frame_vae(build_vae()).train()
    optimizer = torch.optim.AdamW(vae.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    progress = {"step": 0}
    checkpoint = Checkpoint(vae=vae, optimizer=optimizer, progress=progress)
    if (folder / "codec").exists():
        checkpoint.load(folder / "codec")
    bar = step_bar("codec", progress["step"], steps, seconds=5)
    for step in bar:
        seed = step * world + rank
        torch.manual_seed(seed)
        images = scenes(batch // world, random.Random(seed), torch.Generator().manual_seed(seed))
        loss, error = codec_loss(vae, images)
        optimizer.zero_grad()
        loss.backward()
        average_gradients(list(vae.parameters()))
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * rate(step / steps, step)
        optimizer.step()
        bar.set_postfix(error=f"{error.item():.4f}", refresh=False)
        if rank == 0 and ((step + 1) % save_every == 0 or step + 1 == steps):
            progress["step"] = step + 1
            checkpoint.save(folder / "codec")
    vae.eval()
    mean, std = latent_statistics(vae)
    vae.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())
    return vae


@torch.no_grad()
def latent_statistics(vae: AutoencoderKLQwenImage, n: int = 2000, seed: int = 10**6) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each latent channel over ``n`` random scenes, ``(C,)`` each.

    Of samples, as the generator is trained on: a channel that the KL term has emptied is all noise, and scaled by its
    posterior's mean alone it would drown the others.
    """
    rng, g = random.Random(seed), torch.Generator().manual_seed(seed)
    images = (scenes(100, rng, g)[:, :, None] for _ in range(n // 100))
    z = torch.cat([vae.encode(x).latent_dist.sample(g) for x in images])
    return z.mean((0, 2, 3, 4)), z.std((0, 2, 3, 4))
