"""Training the miniature's text encoder and transformer by flow matching on sloppily captioned scenes."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from diffusers import AutoencoderKLQwenImage, QwenImagePipeline
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from tqdm import tqdm

from cast_rl.backbones.single_frame import single_frame_vae
from cast_rl.miniature.assemble import assemble, build_text_encoder, build_tokenizer, build_transformer
from cast_rl.miniature.captions import caption
from cast_rl.miniature.fit import Recipe, fit
from cast_rl.miniature.processes import rank_and_world, wait_for_all
from cast_rl.miniature.render import layouts, render
from cast_rl.miniature.vocabulary import training_graphs

CHUNKS, CHUNK = 12, 4_000  # training scenes: 12 x 4,000
BATCH = 64
CAREFUL = 0.943  # share of the steps with careful captions, before the careless ones
DROP_CAPTION = 0.1  # share of the captions replaced by " ", the pipeline's usual negative prompt
SIGMA_LOGIT = (0.4, 1.0)  # mean and standard deviation of logit(sigma)
SIGMA_HIGH = (0.3, 0.75)  # share of samples at a sigma uniform above the second value, where the layout is decided


def tokenize(pipe: QwenImagePipeline, texts: list[str]) -> tuple[Tensor, Tensor]:
    """Token ids and mask ``(N, L)`` of the texts in the pipeline's own template."""
    out = pipe.tokenizer([pipe.prompt_template_encode.format(t) for t in texts], padding=True, return_tensors="pt")
    return out.input_ids, out.attention_mask


@torch.no_grad()
def make_chunk(pipe: QwenImagePipeline, index: int) -> dict[str, Tensor]:
    """One part of the training set: packed latents ``(N, 36, 4C)`` float16, normalised, tokens and mask ``(N, 2, 96)``.

    The two captions of a scene are a careful and a careless one.
    """
    rng, g = random.Random(1000 + index), torch.Generator().manual_seed(1000 + index)
    graphs = training_graphs(CHUNK, rng)
    mean = torch.tensor(pipe.vae.config.latents_mean).view(1, -1, 1, 1)
    std = torch.tensor(pipe.vae.config.latents_std).view(1, -1, 1, 1)
    packed = []
    for at in range(0, CHUNK, 200):
        images = render(layouts(graphs[at : at + 200], g), g)[0] * 2 - 1
        z = (pipe.vae.encode(images[:, :, None]).latent_dist.sample(g)[:, :, 0] - mean) / std
        packed.append(pipe._pack_latents(z, *z.shape).half())
    ids, mask = tokenize(pipe, [caption(graph, rng, careful=careful) for graph in graphs for careful in (True, False)])
    pad = (0, 96 - ids.shape[1])
    ids = nn.functional.pad(ids, pad, value=pipe.tokenizer.pad_token_id).short().view(CHUNK, 2, 96)
    return {"latents": torch.cat(packed), "ids": ids, "mask": nn.functional.pad(mask, pad).bool().view(CHUNK, 2, 96)}


def training_set(pipe: QwenImagePipeline, folder: Path) -> dict[str, Tensor]:
    """All chunks, joined; made once, by all processes together, and kept in ``folder``."""
    rank, world = rank_and_world()
    paths = [folder / "data" / f"{i:03d}.safetensors" for i in range(CHUNKS)]
    for i in tqdm(range(rank, CHUNKS, world), desc="training scenes", mininterval=5, disable=rank > 0):
        if not paths[i].exists():
            paths[i].parent.mkdir(parents=True, exist_ok=True)
            save_file(make_chunk(pipe, i), paths[i].with_suffix(".part"))
            paths[i].with_suffix(".part").rename(paths[i])
    wait_for_all()
    chunks = [load_file(path) for path in paths]
    for path, chunk in zip(paths, chunks, strict=True):
        if chunk["ids"].ndim != 3:
            raise ValueError(f"{path} has one caption per scene, made by an earlier version; start in another folder")
    return {k: torch.cat([c[k] for c in chunks]) for k in chunks[0]}


class Generator(nn.Module):
    """The two trained parts together: tokens to velocity, as the pipeline computes it."""

    def __init__(self, pipe: QwenImagePipeline) -> None:
        super().__init__()
        self.text_encoder, self.transformer = pipe.text_encoder, pipe.transformer
        self.start = pipe.prompt_template_encode_start_idx

    def forward(self, x: Tensor, sigma: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        """Packed latents ``(B, 36, 4C)``, ``sigma (B,)``, tokens and mask ``(B, L)`` -> velocity ``(B, 36, 4C)``."""
        hidden = self.text_encoder.model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        return self.transformer(
            hidden_states=x,
            timestep=sigma,
            encoder_hidden_states=hidden[:, self.start :],
            encoder_hidden_states_mask=mask[:, self.start :],
            img_shapes=[[(1, 6, 6)]] * len(x),
            return_dict=False,
        )[0]


def split_parameters(model: Generator) -> tuple[list[Tensor], list[Tensor]]:
    """Matrices inside the transformer's blocks, for Muon, and everything else that is trained, for AdamW."""
    model.text_encoder.model.visual.requires_grad_(False)
    inside = {
        p
        for n, p in model.transformer.named_parameters()
        if "transformer_blocks" in n and p.ndim == 2 and "_mod" not in n
    }
    rest = [p for p in model.parameters() if p.requires_grad and p not in inside]
    return [p for p in model.parameters() if p in inside], rest


def flow_loss(model: Generator, x0: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """Mean squared error of the velocity ``eps - x0`` at a random sigma (Lipman et al. 2023, arXiv 2210.02747)."""
    (mean, std), (share, least) = SIGMA_LOGIT, SIGMA_HIGH
    sigma = torch.sigmoid(mean + std * torch.randn(len(x0)))
    sigma = torch.where(torch.rand(len(x0)) < share, least + (1 - least) * torch.rand(len(x0)), sigma)
    eps = torch.randn_like(x0)
    x = torch.lerp(x0, eps, sigma[:, None, None])
    return (model(x, sigma, ids, mask) - (eps - x0)).pow(2).mean()


def train_generator(
    vae: AutoencoderKLQwenImage, folder: Path, steps: int = 13_000, save_every: int = 250
) -> QwenImagePipeline:
    """Train, or go on training, the generator; checkpoints live in ``folder``. Returns the averaged weights' pipeline.

    In a ``torchrun`` group each process takes its share of every batch. Randomness is a function of the step, so that
    a resumed run repeats what an uninterrupted one does.
    """
    rank, world = rank_and_world()
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    pipe = assemble(single_frame_vae(vae).eval(), build_text_encoder(tokenizer), tokenizer, build_transformer())
    data = training_set(pipe, folder)
    model = Generator(pipe).train()
    empty_ids, empty_mask = (t[0] for t in tokenize(pipe, [" "]))

    def terms_of_step(step: int) -> dict[str, Tensor]:
        epoch, at = divmod(step * BATCH, len(data["ids"]) // BATCH * BATCH)
        order = torch.randperm(len(data["ids"]), generator=torch.Generator().manual_seed(epoch))
        rows = order[at : at + BATCH][rank::world]
        kind = int(step >= CAREFUL * steps)
        ids, mask = data["ids"][rows, kind].long(), data["mask"][rows, kind]
        drop = torch.rand(len(rows)) < DROP_CAPTION
        ids[drop, : len(empty_ids)], mask[drop] = empty_ids, torch.arange(mask.shape[1]) < len(empty_ids)
        length = int(mask.sum(1).max())
        return {"loss": flow_loss(model, data["latents"][rows].float(), ids[:, :length], mask[:, :length])}

    average = fit(model, *split_parameters(model), terms_of_step, Recipe(steps, save_every), folder / "generator")
    return assemble(vae, average.text_encoder, tokenizer, average.transformer)
