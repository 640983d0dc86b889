"""The protocol as published: one plain forward pass per question, and one with eager attention for the caption."""

import torch
from transformers import AutoTokenizer, Qwen2VLImageProcessorPil

from cast_rl.judges.load import FAMILIES


class Reference:
    """A checkpoint run question by question, without anything of the judge but its list of answer tokens."""

    def __init__(self, folder, kind):
        self.model = FAMILIES[kind][0].from_pretrained(folder, attn_implementation="eager").eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.processor = Qwen2VLImageProcessorPil.from_pretrained(folder)

    def inputs(self, image, user, said=""):
        """Model inputs for one image ``(3, H, W)`` and the text they hold, with the image's tokens spelt out."""
        shown = self.processor((image * 255).round().to(torch.uint8), return_tensors="pt")
        grid = shown["image_grid_thw"]
        content = [{"type": "image"}, {"type": "text", "text": user}]
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        text = text.replace("<|image_pad|>", "<|image_pad|>" * int(grid.prod() // 4)) + said
        ids = self.tokenizer(text, return_tensors="pt")["input_ids"]
        is_image = (ids == self.model.config.image_token_id).int()
        return {"input_ids": ids, "mm_token_type_ids": is_image, **shown}, text

    @torch.no_grad()
    def chances(self, image, question):
        """Probability ``(V,)`` of each token as the first one of the answer."""
        inputs, _ = self.inputs(image, f"{question} Answer in one word.")
        return self.model(**inputs, use_cache=False).logits[0, -1].softmax(-1)

    @torch.no_grad()
    def attention(self, image, prompt):
        """Attention to the image ``(layers, heads, T, h, w)`` while the prompt is said, and the caption's tokens.

        The tokens are ``(row, start, end)``: which characters of the prompt each stands for.
        """
        inputs, text = self.inputs(image, "Describe this image.", prompt)
        seen = torch.cat(self.model(**inputs, output_attentions=True, use_cache=False).attentions)
        columns = inputs["mm_token_type_ids"][0].bool()
        _, rows, cols = inputs["image_grid_thw"][0].tolist()
        begin = len(text) - len(prompt)
        offsets = self.tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
        tokens = [(i, a - begin, b - begin) for i, (a, b) in enumerate(offsets) if b > begin]
        return seen[..., columns].unflatten(-1, (rows // 2, cols // 2)), tokens


def words(tokens, spans):
    """Rows of the tokens that share a character with one of the spans."""
    characters = {c for start, end in spans for c in range(start, end)}
    return [row for row, start, end in tokens if characters & set(range(max(0, start), end))]
