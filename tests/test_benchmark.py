"""A benchmark's figures, and images as files."""

import json

import pytest
import torch
from PIL import Image
from scipy.stats import gmean

from cast_rl.backbones import load_backbone
from cast_rl.benchmark import hardest, report, soft_tifa, table
from cast_rl.image_files import generate_images, judge_images, read_image, read_image_map
from cast_rl.judges import Judgement
from cast_rl.miniature import GENERATOR, miniature_prompts
from cast_rl.prompts import PromptSet

PROMPTS = PromptSet.sample(4, seed=0, atomicity=(3, 5), skills=("object", "attribute", "count"))
K = PROMPTS.max_atoms


@pytest.fixture(scope="module")
def judged():
    """Random scores of every atom, ``(4, K)`` with their mask; those of prompt 2 are lowest, one of prompt 0 is 0."""
    scores = torch.rand(4, K, generator=torch.Generator().manual_seed(0)) * 0.5 + 0.5
    scores[2] /= 100
    mask = torch.arange(K) < torch.tensor([[len(p.atoms)] for p in PROMPTS])
    return torch.where(mask, scores, 0.0), mask


def test_soft_tifa_is_geneval2s(judged):
    am, gm = soft_tifa(*judged)
    for i, prompt in enumerate(PROMPTS):
        of_prompt = judged[0][i, : len(prompt.atoms)].double()
        assert am[i].item() == pytest.approx(sum(of_prompt.tolist()) / len(of_prompt))
        assert gm[i].item() == pytest.approx(gmean(of_prompt.numpy()))
    am, gm = soft_tifa(torch.tensor([[0.0, 1.0], [0.3, 0.3]]), torch.tensor([[True, True], [False, False]]))
    assert am[0] == 0.5 and gm[0] == 0 and am[1].isnan() and gm[1].isnan()


def test_the_report_divides_the_figures(judged):
    scores, mask = judged
    hard = hardest(PROMPTS, scores, mask, 0.25)
    assert hard == [PROMPTS[2].text]
    figures = report(PROMPTS, scores, mask, hard)
    am, gm = soft_tifa(scores, mask)
    assert figures["all"]["am"] == pytest.approx(am.mean().item()) and figures["all"]["prompts"] == 4
    assert figures["hard_case"] == {"prompts": 1, "am": am[2].item(), "am_se": None, "gm": gm[2].item(), "gm_se": None}
    assert set(figures["atomicity"]) == {"3", "5"} and figures["unjudged_atoms"] == 0
    fives = [i for i, p in enumerate(PROMPTS) if p.atomicity == 5]
    assert figures["atomicity"]["5"]["gm"] == pytest.approx(gm[fives].mean().item())
    counts = [s for p, row in zip(PROMPTS, scores.tolist(), strict=True)
              for a, s in zip(p.atoms, row, strict=False) if a.skill == "count"]  # fmt: skip
    assert figures["skills"]["count"] == {"score": pytest.approx(sum(counts) / len(counts)), "atoms": len(counts)}
    assert json.loads(json.dumps(figures)) == figures and "hard case" in table(figures)


def test_what_was_not_judged_counts_nowhere(judged):
    scores, mask = judged[0].clone(), judged[1].clone()
    scores[1], mask[1] = 0.0, False
    figures = report(PROMPTS, scores, mask, hardest(PROMPTS, scores, mask, 1.0))
    assert figures["all"]["prompts"] == 3 and figures["unjudged_atoms"] == len(PROMPTS[1].atoms)
    assert figures["all"]["am"] == pytest.approx(soft_tifa(*judged)[0][[0, 2, 3]].mean().item())
    assert f"{len(PROMPTS[1].atoms)} atoms could not be judged" in table(figures)
    with pytest.raises(ValueError, match="1 prompts that the benchmark has not, such as 'a gnu'"):
        report(PROMPTS, scores, mask, ["a gnu"])
    with pytest.raises(ValueError, match="above 0 and at most 1, got 0"):
        hardest(PROMPTS, scores, mask, 0)


def test_images_are_made_once_and_a_killed_run_goes_on(tmp_path):
    backbone = load_backbone(GENERATOR, guidance=3.0)
    texts = miniature_prompts(3, 0, held_out=True).texts
    how = {"height": 48, "width": 48, "steps": 2, "batch_size": 2}
    paths = generate_images(backbone, texts, tmp_path / "whole", **how)
    assert list(paths) == texts and len({path.read_bytes() for path in paths.values()}) == 3
    part = generate_images(backbone, texts, tmp_path / "part", **how)
    part[texts[1]].unlink()
    (tmp_path / "part" / "00001.part").write_bytes(b"half an im")
    kept = part[texts[0]].stat().st_mtime_ns
    part = generate_images(backbone, texts, tmp_path / "part", **how)
    assert part[texts[0]].stat().st_mtime_ns == kept
    ours, theirs = (read_image(there[texts[1]]) for there in (paths, part))
    assert (ours - theirs).abs().max() <= 1 / 255 + 1e-6
    with pytest.raises(ValueError, match="steps was 2 and is 3"):
        generate_images(backbone, texts, tmp_path / "part", **how | {"steps": 3})
    with pytest.raises(ValueError, match="other prompts"):
        generate_images(backbone, texts[:2], tmp_path / "part", **how)


class SizeJudge:
    """Scores an image by its width and red."""

    def __call__(self, images, atoms):
        score = images[:, 0].mean((1, 2)) * images.shape[-1] / 100
        scores = score[:, None].expand(-1, max(map(len, atoms))).clone()
        return Judgement(scores, torch.ones_like(scores, dtype=torch.bool))


def test_images_of_several_sizes_are_judged_each_for_its_prompt(tmp_path):
    names = {}
    for i, prompt in enumerate(PROMPTS):
        names[prompt.text] = f"{i}.png"
        Image.new("RGB", (20 if i % 2 else 40, 10), (51 * (i + 1), 0, 0)).save(tmp_path / f"{i}.png")
    (tmp_path / "map.json").write_text(json.dumps(names))
    paths = read_image_map(tmp_path / "map.json", PROMPTS.texts)
    scores, mask = judge_images(SizeJudge(), PROMPTS, paths, batch_size=3)
    assert scores[:, 0].tolist() == pytest.approx([0.08, 0.08, 0.24, 0.16])
    assert mask.sum(1).tolist() == [len(p.atoms) for p in PROMPTS]


def test_bad_maps_and_images_are_named(tmp_path):
    path = tmp_path / "map.json"
    for text, message in [
        ("[1]", "must be an object"),
        ("{", "is not JSON"),
        ("{}", "has no image of 1 of 1 prompts, such as 'a cat'"),
        ('{"a cat": "none.png"}', "names 1 images that are not there"),
    ]:
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_image_map(path, ["a cat"])
    Image.new("RGBA", (4, 4), (0, 0, 0, 0)).save(tmp_path / "clear.png")
    assert read_image(tmp_path / "clear.png").min() == 1
    (tmp_path / "half.png").write_bytes((tmp_path / "clear.png").read_bytes()[:40])
    with pytest.raises(ValueError, match="half.png is no image"):
        read_image(tmp_path / "half.png")
