"""F11: every image is judged by its own prompt, whatever the order."""

import random

import pytest
import torch
from tiny_judges import save_judge

from cast_rl.judges import load_judge
from cast_rl.miniature.vocabulary import sample_graphs


@pytest.mark.filterwarnings("ignore:no words of the prompt")
def test_f11_scores_permute_with_images_and_prompts(tmp_path):
    judge = load_judge(save_judge("qwen3_vl", tmp_path))
    atoms = [list(graph.atoms()) for graph in sample_graphs(6, 0, held_out=False)]
    images = torch.rand(6, 3, 32, 32)
    straight = judge(images, atoms)
    assert (straight.scores[0, :3] - straight.scores[1, :3]).abs().max() > 1e-2
    for seed in range(3):
        order = random.Random(seed).sample(range(6), 6)
        permuted = judge(images[order], [atoms[b] for b in order])
        torch.testing.assert_close(permuted.scores, straight.scores[order], rtol=0, atol=1e-5)
        torch.testing.assert_close(permuted.evidence, straight.evidence[order], rtol=0, atol=1e-5)
        assert torch.equal(permuted.mask, straight.mask[order])
    # The same image under another prompt is another question.
    swapped = judge(images, atoms[::-1])
    assert (swapped.scores[0, :3] - straight.scores[0, :3]).abs().max() > 1e-2
