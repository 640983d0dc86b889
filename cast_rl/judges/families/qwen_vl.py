"""What Qwen's vision-language models share: a vision tower over flat patches, M-RoPE, and a decoder with a cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache, PreTrainedModel

from cast_rl.judges.attention_tap import Tap, tapped
from cast_rl.judges.families.base import Family, Prefix
from cast_rl.judges.packing import Packed


class PatchMatmul(nn.Module):
    """A patch embedding as the matrix product it is: its convolution's stride equals its kernel.

    Holds the convolution itself, so that names and shapes of the weights stay what they were. About twice as fast as
    Conv3d on a CPU.
    """

    def __init__(self, proj: nn.Conv3d) -> None:
        super().__init__()
        self.proj = proj

    def forward(self, patches: Tensor) -> Tensor:
        """``(N, 3 * frames * patch**2)`` -> ``(N, hidden)``."""
        weight = self.proj.weight.flatten(1)
        return F.linear(patches.to(weight.dtype), weight, self.proj.bias)


class _Continuation:
    """Stands in for a cache: a layer sees prefix and new tokens joined, and the prefix's cache stays as it is."""

    def __init__(self, cache: DynamicCache, length: int) -> None:
        self._layers, self._length = cache.layers, length

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._length

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args, **kwargs) -> tuple[Tensor, Tensor]:
        layer = self._layers[layer_idx]
        return torch.cat([layer.keys, key], 2), torch.cat([layer.values, value], 2)


class QwenVL(Family):
    """Images first, then text; positions of an image's tokens are its rows and columns."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        text = model.config.get_text_config()
        self.layers, self.heads = text.num_hidden_layers, text.num_attention_heads
        self.merge = model.config.vision_config.spatial_merge_size
        embed = model.model.visual.patch_embed
        if not isinstance(embed, PatchMatmul):
            model.model.visual.patch_embed = PatchMatmul(embed.proj)

    @property
    def text_model(self) -> nn.Module:
        return self.model.model.language_model

    def prefix(self, patches: Tensor, grid: tuple[int, int], ids: Sequence[int], columns: slice) -> Prefix:
        core, B = self.model.model, len(patches)
        row = torch.tensor([ids])
        is_image = torch.zeros_like(row)
        is_image[:, columns] = 1
        size = torch.tensor([[1, grid[0] * self.merge, grid[1] * self.merge]])
        # All images of the batch have one grid, hence the same positions; explicit ones, as the model would otherwise
        # go by the offset that it remembers of its last call.
        positions, _ = core.get_rope_index(row, mm_token_type_ids=is_image, image_grid_thw=size)
        cache = DynamicCache(config=self.text_model.config)
        core(
            input_ids=row.expand(B, -1).to(self.device),
            pixel_values=patches.flatten(0, 1),
            image_grid_thw=size.expand(B, -1).to(self.device),
            mm_token_type_ids=is_image.expand(B, -1).to(self.device),
            position_ids=positions.expand(-1, B, -1).to(self.device),
            cache=cache,
            use_cache=True,
        )
        return Prefix(cache, len(ids), int(positions.max()) + 1, columns)

    def branches(self, prefix: Prefix, packed: Packed, tap: Tap | None) -> Tensor:
        positions = (prefix.next_position + packed.offset).expand(3, -1, -1)
        options = {} if tap is None else {"tap": tap}
        with tapped(self.text_model):
            return self.text_model(
                inputs_embeds=self.text_model.embed_tokens(packed.ids),
                attention_mask=packed.mask(prefix.length),
                position_ids=positions,
                cache=_Continuation(prefix.cache, prefix.length),
                **options,
            ).last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.lm_head(hidden)
