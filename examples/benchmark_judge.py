"""How much one packed pass saves: the judge against the protocol as published, on a random-weight Qwen3-VL.

    OMP_NUM_THREADS=1 python examples/benchmark_judge.py

The protocol runs the model once per question, and once more on eager attention for the evidence. Both are measured in
one run, on the same weights and one thread: processor time for scores and evidence of one image, best of some repeats,
and the peak of the process's memory above what it held with the model loaded (Linux only). Eager attention is that of
the whole model, as ``attn_implementation="eager"`` gives it, and, to be fair to it, that of the decoder alone.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import Qwen2VLImageProcessorPil, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from cast_rl.judges import VLMJudge
from cast_rl.judges.chat import CAPTION_REQUEST, QUESTION
from cast_rl.judges.families.qwen3_vl import Qwen3VL
from cast_rl.judges.images import ImageSettings
from cast_rl.miniature.assemble import MARKERS, build_tokenizer
from cast_rl.scene_graph import Atom, Entity, Relation, SceneGraph

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.content %}"
    "{% if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SCENE = SceneGraph(
    (Entity("circle", 2, ("red",)), Entity("square", 1, ("blue",)), Entity("cross", 1, ("green",))),
    (Relation(0, "left of", 1),),
)
EAGER = {"eager": "eager", "eager decoder": {"text_config": "eager", "vision_config": "sdpa"}}


def build(hidden: int, layers: int):
    """A random Qwen3-VL, a tokenizer in which every word is a token, and Qwen3-VL's image processor."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = TEMPLATE
    ids = [tokenizer.convert_tokens_to_ids(m) for m in MARKERS]
    head = 32
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer), "hidden_size": hidden, "intermediate_size": 3 * hidden,
            "num_hidden_layers": layers, "num_attention_heads": hidden // head,
            "num_key_value_heads": max(1, hidden // head // 2), "head_dim": head, "max_position_embeddings": 8192,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 5e6, "mrope_section": [6, 5, 5], "mrope_interleaved": True
            },
        },
        vision_config={
            "depth": 6, "hidden_size": 192, "intermediate_size": 576, "num_heads": 6, "out_hidden_size": hidden,
            "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [1, 3, 5],
        },
        vision_start_token_id=ids[2], vision_end_token_id=ids[3], image_token_id=ids[4], video_token_id=ids[5],
    )  # fmt: skip
    torch.manual_seed(0)
    processor = Qwen2VLImageProcessorPil(
        patch_size=16, merge_size=2, temporal_patch_size=2, image_mean=[0.5] * 3, image_std=[0.5] * 3,
        size={"shortest_edge": 65536, "longest_edge": 16777216},
    )  # fmt: skip
    return Qwen3VLForConditionalGeneration(config).eval(), tokenizer, processor


def image_of(tokens: int) -> Tensor:
    """An 8-bit image ``(3, S, S)`` of ``tokens`` image tokens."""
    side = round(tokens**0.5) * 32
    return torch.randint(0, 256, (3, side, side), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


class OneByOne:
    """The published protocol: everything anew for every question, and an eager pass for the evidence."""

    def __init__(self, model, tokenizer, processor) -> None:
        self.model, self.tokenizer, self.processor = model, tokenizer, processor

    def inputs(self, image: Tensor, user: str, said: str = "") -> dict[str, Tensor]:
        shown = self.processor(image, return_tensors="pt")
        messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": user}]}]
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) + said
        tokens = int(shown["image_grid_thw"].prod() // 4)
        ids = self.tokenizer(text.replace("<|image_pad|>", "<|image_pad|>" * tokens), return_tensors="pt")["input_ids"]
        return {"input_ids": ids, "mm_token_type_ids": (ids == self.model.config.image_token_id).int(), **shown}

    @torch.no_grad()
    def scores(self, image: Tensor, atoms: Sequence[Atom]) -> Tensor:
        """The probability of the whole vocabulary after each question, ``(K, V)``."""
        self.model.set_attn_implementation("sdpa")
        asked = [self.inputs(image, QUESTION.format(atom.question)) for atom in atoms]
        logits = [self.model(**inputs, use_cache=False, logits_to_keep=1).logits[0, -1] for inputs in asked]
        return torch.stack(logits).softmax(-1)

    @torch.no_grad()
    def attention(self, image: Tensor, atoms: Sequence[Atom], attention: str | dict = "eager") -> tuple[Tensor, ...]:
        """The attention matrices of all layers while the prompt is said."""
        self.model.set_attn_implementation(attention)
        inputs = self.inputs(image, CAPTION_REQUEST, atoms[0].prompt)
        return self.model(**inputs, use_cache=False, output_attentions=True, logits_to_keep=1).attentions


def judge_of(model, tokenizer, processor) -> VLMJudge:
    model.set_attn_implementation("sdpa")
    return VLMJudge(Qwen3VL(model), tokenizer, ImageSettings.from_processor(processor))


def seconds(call: Callable[[], object], repeats: int) -> float:
    """Processor time of a call, best of ``repeats`` after one to warm up."""
    call()
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        call()
        best = min(best, time.process_time() - start)
    return best


def _memory(field: str) -> float:
    """``VmRSS``, what the process holds, or ``VmHWM``, the most it held since the peak was last reset; in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status names no {field}")


def peak_memory(what: str, hidden: int, layers: int, tokens: int) -> float:
    """MB at the peak of scores and evidence, or of an eager pass, above the model's; meant for a fresh process."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    parts, atoms = build(hidden, layers), SCENE.atoms()[:8]
    if what == "judge":
        judge = judge_of(*parts)
        run = lambda image: judge(image[None], [atoms])  # noqa: E731
    else:
        plain = OneByOne(*parts)
        run = lambda image: plain.attention(image, atoms, EAGER[what])  # noqa: E731
    run(image_of(64))  # what libraries set up once is not the method's
    image = image_of(tokens)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _memory("VmRSS")
    run(image)
    return _memory("VmHWM") - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256, help="of the decoder, a multiple of 32")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256, help="image tokens for the timing, a square")
    parser.add_argument("--memory-tokens", type=int, default=1024, help="image tokens for the memory, a square")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")

    plain, judge = OneByOne(*build(args.hidden, args.layers)), judge_of(*build(args.hidden, args.layers))
    image, facts = image_of(args.tokens), SCENE.atoms()
    figures: dict[str, float] = {}
    for K in (1, 8):
        atoms = facts[:K]
        one = seconds(lambda atoms=atoms: plain.scores(image, atoms), args.repeats)
        packed = seconds(lambda atoms=atoms: judge(image[None], [atoms]), args.repeats)
        figures |= {f"questions_{K}": one, f"judge_{K}": packed}
    for name, attention in EAGER.items():
        figures[name] = seconds(lambda attention=attention: plain.attention(image, facts, attention), args.repeats)
    found, chances = judge(image[None], [facts[:8]]).scores[0], plain.scores(image, facts[:8])
    asked = judge._ask(facts[:8])
    expected = torch.stack([row[list(ids)].sum() for row, ids in zip(chances, asked.answers, strict=True)])
    figures["largest_difference"] = float((found - expected).abs().max())

    print(f"{args.tokens} image tokens, scores and evidence of one image, ms of processor time on one thread")
    print(
        f"{'K':>2s} {'questions':>10s} {'+ eager':>9s} {'judge':>9s} {'ratio':>7s} {'ratio, eager decoder only':>26s}"
    )
    for K in (1, 8):
        questions, packed = figures[f"questions_{K}"], figures[f"judge_{K}"]
        whole, decoder = questions + figures["eager"], questions + figures["eager decoder"]
        print(f"{K:2d} {1e3 * questions:10.1f} {1e3 * whole:9.1f} {1e3 * packed:9.1f} {whole / packed:7.2f} "
              f"{decoder / packed:26.2f}")  # fmt: skip
    print(f"largest difference of a score: {figures['largest_difference']:.1e}")

    if Path("/proc/self/clear_refs").exists():
        context = multiprocessing.get_context("spawn")
        for what in ("judge", *EAGER):
            with context.Pool(1) as pool:
                size = (what, args.hidden, args.layers, args.memory_tokens)
                figures[f"memory {what}"] = pool.apply(peak_memory, size)
        print(f"\n{args.memory_tokens} image tokens, peak MB above the model's")
        for what in ("judge", *EAGER):
            mine = figures[f"memory {what}"]
            print(f"{what:>14s} {mine:8.0f} {mine / figures['memory judge']:6.1f} x")
    print(json.dumps({name.replace(" ", "_"): round(value, 7) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
