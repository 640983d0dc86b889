"""The judge gives what the published protocol gives, one question and one image at a time."""

import pytest
import torch
from judge_reference import Reference, words

from cast_rl.judges import EvidenceSettings, load_judge
from cast_rl.judges.answers import answer_tokens
from cast_rl.judges.evidence import unit_mean

pytestmark = pytest.mark.filterwarnings("ignore:no words of the prompt")


@pytest.fixture
def reference(kind, folder):
    return Reference(folder, kind)


def close(a, b, tolerance):
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


@pytest.mark.parametrize("mode", ["robust", "official"])
def test_scores_equal_one_pass_per_question(folder, reference, images, atoms, mode):
    judged = load_judge(folder, answers=mode)(images, atoms)
    assert judged.mask.tolist() == [[k < len(row) for k in range(7)] for row in atoms]
    for b, row in enumerate(atoms):
        for k, atom in enumerate(row):
            ids = answer_tokens(reference.tokenizer, atom.question, atom.answer, mode)
            close(judged.scores[b, k], reference.score(images[b], atom.question, ids), 1e-5)
    found = judged.scores[judged.mask]
    assert found.std() > 0.05  # else the tolerance would say little


def test_mixed_sizes_equal_one_pass_per_question(folder, reference, atoms):
    sizes = [(32, 40), (48, 24), (32, 40)]
    generator = torch.Generator().manual_seed(0)
    images = [torch.randint(0, 256, (3, *s), generator=generator).float() / 255 for s in sizes]
    judged = load_judge(folder)(images, atoms)
    assert judged.evidence.shape == (3, 7, 32, 32)
    for b, row in enumerate(atoms):
        for k, atom in enumerate(row):
            ids = answer_tokens(reference.tokenizer, atom.question, atom.answer, "robust")
            close(judged.scores[b, k], reference.score(images[b], atom.question, ids), 1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        EvidenceSettings(),
        EvidenceSettings(layers=(0, 2), query="predict"),
        EvidenceSettings(heads=((0, 1), (2, 0), (2, 3))),
        EvidenceSettings(layers=(1,), query="predict", relative=True),
    ],
    ids=["default", "layers", "heads", "relative"],
)
def test_evidence_equals_eager_attention(folder, reference, images, atoms, settings):
    judge = load_judge(folder, evidence=settings)
    judged = judge(images, atoms)
    chosen = settings.chosen(3, 4)
    pairs = [(layer, head) for layer, heads in chosen.items() for head in (range(4) if heads is None else heads)]
    for b, row in enumerate(atoms):
        seen, tokens = reference.attention(images[b], row[0].prompt)
        seen = torch.stack([seen[layer, head] for layer, head in pairs]).mean(0)  # (T, h, w)
        generic = seen[tokens[0][0] - 1]
        for k, atom in enumerate(row):
            rows = [i - (settings.query == "predict") for i in words(tokens, atom.spans)]
            expected = seen[rows].mean(0)
            if settings.relative:
                expected = expected / (generic + 1e-6 * generic.mean())
            assert judged.evidence.dtype == torch.float32
            torch.testing.assert_close(judged.evidence[b, k], unit_mean(expected), rtol=2e-5, atol=1e-6)
            close(judged.evidence[b, k].mean(), torch.tensor(1.0), 1e-5)


def test_head_attention_equals_eager_attention(folder, reference, images, atoms):
    seen = load_judge(folder).head_attention(images, atoms)
    assert seen.shape == (3, 7, 3, 4, 4, 5)
    for b, row in enumerate(atoms):
        expected, tokens = reference.attention(images[b], row[0].prompt)
        for k, atom in enumerate(row):
            close(seen[b, k], expected[:, :, words(tokens, atom.spans)].mean(2), 1e-6)
        assert (seen[b, len(row) :] == 0).all()


def test_neighbours_and_order_change_nothing(folder, images, atoms):
    judge = load_judge(folder, evidence=EvidenceSettings(relative=True))
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


@pytest.mark.parametrize("budget", [1, 100, 250])
def test_the_token_budget_changes_nothing(judge_folders, images, atoms, budget):
    folder = judge_folders("qwen3_vl")
    whole = load_judge(folder)(images, atoms)
    passes = []
    frugal = load_judge(folder, token_budget=budget)
    branches = frugal.family.branches
    frugal.family.branches = lambda prefix, packed, tap: passes.append(packed.ids.shape) or branches(prefix, packed, tap)
    split = frugal(images, atoms)
    close(split.scores, whole.scores, 1e-5)
    close(split.evidence, whole.evidence, 1e-5)
    assert len(passes) > 1
    if budget > 1:
        assert all(n * (25 + t) <= budget for n, t in passes)


def test_a_list_gives_what_a_tensor_gives(judge, judge_folders, images, atoms):
    listed = judge(list(images), atoms)
    tensor = load_judge(judge_folders("qwen3_vl"), evidence_size=(32, 32))(images, atoms)
    close(listed.scores, tensor.scores, 1e-6)
    close(listed.evidence, tensor.evidence, 1e-5)


def test_atoms_of_two_prompts_about_one_image(judge, images, atoms):
    both = judge(images[:1], [atoms[0] + atoms[1]])
    first, second = judge(images[:1], atoms[:1]), judge(images[:1], atoms[1:2])
    close(both.scores, torch.cat([first.scores, second.scores], 1), 1e-5)
    close(both.evidence, torch.cat([first.evidence, second.evidence], 1), 1e-5)


def test_scores_alone(judge, judge_folders, images, atoms):
    plain = load_judge(judge_folders("qwen3_vl"), evidence=False)(images, atoms)
    assert plain.evidence is None
    close(plain.scores, judge(images, atoms).scores, 1e-5)
    with pytest.raises(ValueError, match="evidence=None"):
        load_judge(judge_folders("qwen3_vl"), evidence=False).head_attention(images, atoms)


def test_half_precision_stays_close(judge, judge_folders, images, atoms):
    half = load_judge(judge_folders("qwen3_vl"), dtype="bfloat16")(images, atoms)
    assert half.scores.dtype == half.evidence.dtype == torch.float32
    close(half.evidence.mean((-2, -1)), half.mask.float(), 1e-5)
    whole = judge(images, atoms).scores
    assert (half.scores - whole).abs().max() < 0.2
