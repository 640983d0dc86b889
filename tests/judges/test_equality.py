"""The judge gives what the published protocol gives, one question and one image at a time."""

import pytest
import torch
from judge_reference import words
from PIL import Image

from cast_rl.judges import EvidenceSettings
from cast_rl.judges.answers import answer_tokens
from cast_rl.judges.evidence import unit_mean

pytestmark = pytest.mark.filterwarnings("ignore:no words of the prompt")


def close(a, b, tolerance):
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


def test_scores_equal_one_pass_per_question(kind, make_judge, reference, images, atoms):
    judged = {mode: make_judge(kind, answers=mode)(images, atoms) for mode in ("robust", "official")}
    for b, row in enumerate(atoms):
        for k, atom in enumerate(row):
            chances = reference.chances(images[b], atom.question)
            for mode, found in judged.items():
                ids = answer_tokens(reference.tokenizer, atom.question, atom.answer, mode)
                close(found.scores[b, k], sum(chances[i] for i in ids).clamp_max(1), 1e-5)
                assert found.mask.tolist() == [[k < len(row) for k in range(7)] for row in atoms]
    assert found.scores[found.mask].std() > 0.05  # else the tolerance would say little


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen2_5_vl"])
def test_mixed_sizes_equal_one_pass_per_question(kind, make_judge, reference, atoms):
    sizes = [(32, 40), (48, 24), (32, 40)]
    generator = torch.Generator().manual_seed(0)
    images = [torch.randint(0, 256, (3, *s), generator=generator).float() / 255 for s in sizes]
    judged = make_judge(kind)(images, atoms)
    assert judged.evidence.shape == (3, 7, 32, 32)
    close(judged.evidence.mean((-2, -1)), judged.mask.float(), 1e-5)
    for b, row in enumerate(atoms):
        for k, atom in enumerate(row[:3]):
            ids = answer_tokens(reference.tokenizer, atom.question, atom.answer, "robust")
            close(judged.scores[b, k], reference.chances(images[b], atom.question)[ids].sum(), 1e-5)


def test_evidence_equals_eager_attention(kind, make_judge, reference, images, atoms):
    """Reference: all heads of all layers from ``output_attentions``, averaged over those chosen."""
    eager = [reference.attention(images[b], row[0].prompt) for b, row in enumerate(atoms)]
    for settings in (
        EvidenceSettings(),
        EvidenceSettings(layers=(0, 2), query="predict"),
        EvidenceSettings(heads=((0, 1), (2, 0), (2, 3))),
        EvidenceSettings(layers=(1,), query="predict", relative=True),
    ):
        judged = make_judge(kind, evidence=settings)(images, atoms)
        assert judged.evidence.dtype == torch.float32
        close(judged.evidence.mean((-2, -1)), judged.mask.float(), 1e-5)
        chosen = settings.chosen(3, 4)
        pairs = [(layer, head) for layer, heads in chosen.items() for head in (range(4) if heads is None else heads)]
        for b, row in enumerate(atoms):
            seen, tokens = eager[b]
            seen = torch.stack([seen[layer, head] for layer, head in pairs]).mean(0)  # (T, h, w)
            generic = seen[tokens[0][0] - 1]
            for k, atom in enumerate(row):
                rows = [i - (settings.query == "predict") for i in words(tokens, atom.spans)]
                expected = seen[rows].mean(0)
                if settings.relative:
                    expected = expected / (generic + 1e-6 * generic.mean())
                # As shares of the map, whose mean of 1 makes values as large as the number of image tokens.
                close(judged.evidence[b, k] / seen[0].numel(), unit_mean(expected) / seen[0].numel(), 1e-6)


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen2_5_vl"])
def test_head_attention_equals_eager_attention(kind, make_judge, reference, images, atoms):
    seen = make_judge(kind).head_attention(images, atoms)
    assert seen.shape == (3, 7, 3, 4, 4, 5)
    for b, row in enumerate(atoms):
        expected, tokens = reference.attention(images[b], row[0].prompt)
        for k, atom in enumerate(row):
            close(seen[b, k], expected[:, :, words(tokens, atom.spans)].mean(2), 1e-6)
        assert (seen[b, len(row) :] == 0).all()


def test_neighbours_and_order_change_nothing(kind, make_judge, images, atoms):
    judge = make_judge(kind, evidence=EvidenceSettings(relative=True))
    together = judge(images, atoms)
    for b, row in enumerate(atoms):
        alone = judge(images[b : b + 1], [row])
        close(together.scores[b, : len(row)], alone.scores[0], 1e-5)
        close(together.evidence[b, : len(row)], alone.evidence[0], 1e-5)
    order = [2, 0, 1]
    permuted = judge(images[order], [atoms[b] for b in order])
    close(permuted.scores, together.scores[order], 1e-5)
    close(permuted.evidence, together.evidence[order], 1e-5)
    assert torch.equal(permuted.mask, together.mask[order])
    backwards = judge(images, [row[::-1] for row in atoms])
    close(backwards.scores[0], together.scores[0].flip(0), 1e-5)
    close(backwards.evidence[0], together.evidence[0].flip(0), 1e-5)


def test_the_tower_and_the_prefix_run_once_per_image_and_branches_in_one_pass(kind, make_judge, images, atoms):
    """All 15 questions and 3 captions of three images: one call each of the tower, the prefix and the packed pass."""
    judge = make_judge(kind)
    model = judge.family.model.model
    shown, passes = [], []
    hooks = [
        model.visual.register_forward_hook(lambda module, given, out: shown.append(len(given[0]))),
        model.language_model.layers[0].register_forward_hook(lambda module, given, out: passes.append(len(given[0]))),
    ]
    judge(images, atoms)
    for hook in hooks:
        hook.remove()
    per_image = images.shape[-2] * images.shape[-1] // judge.images.patch**2
    assert shown == [len(images) * per_image]
    assert passes == [len(images)] * 2


def test_images_take_no_way_through_pil_or_numpy(make_judge, images, atoms, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("an image left the device")

    expected = make_judge()(images, atoms).scores
    for owner, name in ((torch.Tensor, "numpy"), (torch.Tensor, "cpu"), (Image, "fromarray")):
        monkeypatch.setattr(owner, name, refuse)
    assert torch.equal(make_judge()(images, atoms).scores, expected)


@pytest.mark.parametrize("budget", [1, 100, 400])
def test_the_token_budget_changes_nothing(make_judge, images, atoms, budget, monkeypatch):
    whole = make_judge()(images, atoms)
    frugal = make_judge(token_budget=budget)
    passes = []
    run = frugal.family.branches

    def branches(prefix, packed, tap):
        passes.append(len(packed.ids) * (prefix.length + packed.ids.shape[1]))
        return run(prefix, packed, tap)

    monkeypatch.setattr(frugal.family, "branches", branches)
    split = frugal(images, atoms)
    close(split.scores, whole.scores, 1e-5)
    close(split.evidence, whole.evidence, 1e-5)
    assert len(passes) > 1
    assert budget == 1 or max(passes) <= budget


def test_a_list_gives_what_a_tensor_gives(make_judge, images, atoms):
    listed = make_judge()(list(images), atoms)
    tensor = make_judge(evidence_size=(32, 32))(images, atoms)
    close(listed.scores, tensor.scores, 1e-6)
    close(listed.evidence, tensor.evidence, 1e-5)


def test_atoms_of_two_prompts_about_one_image(make_judge, images, atoms):
    judge = make_judge(evidence=EvidenceSettings(relative=True))
    both = judge(images[:1], [atoms[0] + atoms[1]])
    first, second = judge(images[:1], atoms[:1]), judge(images[:1], atoms[1:2])
    close(both.scores, torch.cat([first.scores, second.scores], 1), 1e-5)
    close(both.evidence, torch.cat([first.evidence, second.evidence], 1), 1e-5)


def test_scores_alone(make_judge, images, atoms):
    plain = make_judge(evidence=None)
    judged = plain(images, atoms)
    assert judged.evidence is None
    close(judged.scores, make_judge()(images, atoms).scores, 1e-5)
    with pytest.raises(ValueError, match="evidence=None"):
        plain.head_attention(images, atoms)
