"""Measuring on a tiny pipeline: what is seen at each step, going on after a kill, and what the key depends on."""

from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from tiny_judges import save_judge

from cast_rl.backbones import load_backbone
from cast_rl.fingerprint import weights_fingerprint
from cast_rl.judges import EvidenceSettings, Judgement, load_judge
from cast_rl.prompt_bank import PromptBank
from cast_rl.prompts import Prompt
from cast_rl.sampling import ode_rollout
from cast_rl.scene_graph import Atom
from cast_rl.window import StructureProfile
from cast_rl.window.draw import draw_structure
from cast_rl.window.key import dependencies, identify_judge
from cast_rl.window.measure import measure_structure
from cast_rl.window.profile import digest

SIZE = {"height": 64, "width": 64}
STEPS = 4


class Bright:
    """An atom holds in every other of 80 grades of brightness on the left, or at the top; images are counted."""

    def __init__(self, margin: float = 0.0, fail_at: int | None = None):
        self.margin = margin
        self.calls: list[int] = []
        self.fail_at = [fail_at]

    def __call__(self, images, atoms):
        if len(self.calls) == self.fail_at[0]:
            raise RuntimeError("killed")
        self.calls.append(len(images))
        scores = torch.zeros(len(images), max(map(len, atoms)))
        mask = torch.zeros_like(scores, dtype=torch.bool)
        for b, row in enumerate(atoms):
            for k, atom in enumerate(row):
                plane = images[b, atom.value] if atom.skill == "object" else images[b, atom.value].T
                scores[b, k] = float((plane[:, :32].mean() + self.margin) * 40 % 1 > 0.5)
                mask[b, k] = True
        return Judgement(scores, mask)


def prompt(i: int) -> Prompt:
    skills = ("object", "position", "count")[: 1 + i % 3]
    return Prompt(f"thing {i}", tuple(Atom(s, f"{s}?", "Yes", value=i % 3) for s in skills))


PROMPTS = [prompt(i) for i in range(5)]


@pytest.fixture(scope="module")
def backbone(qwen_folder):
    return load_backbone(qwen_folder)


@pytest.fixture(scope="module")
def profile(backbone):
    return measure_structure(backbone, Bright(), PROMPTS, STEPS, **SIZE, batch_size=2, strip=3)


def test_every_step_s_estimate_is_judged_and_the_last_is_the_final_image(backbone, profile):
    bank = PromptBank.encode(backbone, [p.text for p in PROMPTS])
    for i, p in enumerate(PROMPTS):
        images = []
        final = ode_rollout(
            backbone,
            backbone.initial_latents([i], 64, 64),
            *bank(torch.tensor([i])),
            steps=STEPS,
            **SIZE,
            callback=lambda step, x, sigma, v, images=images: images.append(backbone.decode(x - sigma * v)),
        )
        torch.testing.assert_close(images[-1], backbone.decode(final), rtol=0, atol=1e-4)
        seen = Bright()(torch.cat(images), [p.atoms] * STEPS).scores.T
        assert torch.equal(profile.holds[i, : len(p.atoms)], seen.to(torch.int8)), p.text
        assert (profile.holds[i, len(p.atoms) :] == -1).all()
    assert len(profile.holds.unique()) == 3 and (profile.holds[..., 0] != profile.holds[..., -1]).any()
    assert torch.equal(profile.sigmas, backbone.sigmas(STEPS, 64, 64))
    torch.testing.assert_close(profile.similarity[:, -1], torch.ones(5))
    assert profile.similarity_by_chance < 0.999
    assert profile.strip.shape == (3, STEPS, 3, 64, 64) and profile.strip.dtype == torch.uint8


def test_it_is_repeated_by_its_seed_whatever_the_batch_and_leaves_torch_s_random_state_alone(backbone, profile):
    judge = Bright()
    state = torch.get_rng_state()
    again = measure_structure(backbone, judge, PROMPTS, STEPS, **SIZE, batch_size=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert judge.calls == [3] * STEPS + [2] * STEPS
    assert torch.equal(again.holds, profile.holds) and again.key == profile.key
    torch.testing.assert_close(again.similarity, profile.similarity, rtol=0, atol=1e-4)
    other = measure_structure(backbone, judge, PROMPTS, STEPS, **SIZE, seed=9)
    assert (other.similarity - profile.similarity).abs().max() > 1e-3 and other.key != profile.key


def test_a_killed_measurement_goes_on_and_a_finished_one_is_found(backbone, profile, tmp_path):
    options = SIZE | {"batch_size": 2, "strip": 3, "cache": tmp_path}
    with pytest.raises(RuntimeError, match="killed"):
        measure_structure(backbone, Bright(fail_at=STEPS + 2), PROMPTS, STEPS, **options)
    judge = Bright()
    rest = measure_structure(backbone, judge, PROMPTS, STEPS, **options)
    assert judge.calls == [2] * STEPS + [1] * STEPS
    idle = Bright()
    found = measure_structure(backbone, idle, PROMPTS, STEPS, **options)
    assert idle.calls == []
    for result in (rest, found):
        for name in ("holds", "similarity", "strip"):
            assert torch.equal(getattr(result, name), getattr(profile, name)), name


def test_a_stale_measurement_is_not_used(qwen_folder, tmp_path):
    backbone = load_backbone(qwen_folder)
    options = SIZE | {"cache": tmp_path}
    before = measure_structure(backbone, Bright(), PROMPTS, STEPS, **options)
    with torch.no_grad():
        backbone.transformer.img_in.weight[0, 0] += 0.1
    judge = Bright()
    after = measure_structure(backbone, judge, PROMPTS, STEPS, **options)
    assert judge.calls == [5] * STEPS and after.key != before.key
    # Not even where somebody renames the folder.
    (tmp_path / before.key).rename(tmp_path / "kept")
    (tmp_path / after.key).rename(tmp_path / before.key)
    with torch.no_grad():
        backbone.transformer.img_in.weight[0, 0] -= 0.1
    judge = Bright()
    measure_structure(backbone, judge, PROMPTS, STEPS, **options)
    assert judge.calls == [5] * STEPS


def test_the_key_follows_from_everything_that_a_profile_depends_on(qwen_folder):
    def key(judge=None, prompts=PROMPTS, change=lambda backbone: None, **settings):
        backbone = load_backbone(qwen_folder)
        change(backbone)
        return digest(dependencies(backbone, judge or Bright(), prompts, **({"seed": 0, "steps": 4} | settings)))

    other_atoms = [*PROMPTS[:-1], Prompt(PROMPTS[-1].text, (Atom("object", "another?", "Yes"),))]
    keys = [
        key(),
        key(seed=1),
        key(steps=5),
        key(judge=Bright(margin=0.1)),
        key(judge=Bright().__call__),
        key(judge=torch.nn.Linear(1, 1)),
        key(prompts=PROMPTS[::-1]),
        key(prompts=other_atoms),
        key(change=lambda backbone: setattr(backbone, "guidance", 2.0)),
        key(change=lambda backbone: backbone.pipe.tokenizer.add_tokens(["unheard-of"])),
        key(change=lambda backbone: backbone.vae.decoder.conv_in.bias.data.add_(0.01)),
        key(change=lambda backbone: backbone.pipe.text_encoder.bfloat16()),
        key(change=lambda backbone: backbone.pipe.scheduler.register_to_config(shift_terminal=0.1)),
    ]
    assert len(set(keys)) == len(keys)
    assert key() == keys[0]


def test_a_vision_language_judge_is_known_by_all_that_its_judgements_follow_from(tmp_path):
    folder, other = save_judge("qwen3_vl", tmp_path / "a"), save_judge("qwen2_5_vl", tmp_path / "b")
    judge = load_judge(folder)
    changed = load_judge(folder)
    changed.family.model.lm_head.weight.data[0] += 0.1
    taught = load_judge(folder)
    taught.tokenizer.add_tokens(["unheard-of"])
    judges = [
        judge,
        changed,
        taught,
        load_judge(other),
        load_judge(folder, dtype="bfloat16"),
        load_judge(folder, answers="official"),
        load_judge(folder, evidence=False),
        load_judge(folder, evidence=EvidenceSettings(relative=True)),
        load_judge(folder, evidence_size=(4, 4)),
    ]
    known = [digest(identify_judge(each)) for each in judges]
    assert len(set(known)) == len(known)
    wrapped = [digest(identify_judge(SimpleNamespace(inner=each))) for each in judges[:3]]
    assert len(set(wrapped)) == 3, "a judge that wraps another is known by it, too"
    assert digest(identify_judge(load_judge(folder, token_budget=100))) == known[0], "which changes no result"


def test_true_guidance_of_flux_is_part_of_the_key(tiny_folder):
    def key(scale):
        backbone = load_backbone(tiny_folder("FluxPipeline"), guidance=3.5, true_cfg_scale=scale)
        return digest(dependencies(backbone, Bright(), PROMPTS))

    assert len({key(scale) for scale in (None, 2.0, 3.0)}) == 3


def test_a_fingerprint_samples_large_tensors_and_sees_names_shapes_and_types():
    module = torch.nn.Linear(300, 300)
    before = weights_fingerprint(module)
    assert before == weights_fingerprint(module)
    with torch.no_grad():
        module.weight += 1e-3
    trained = weights_fingerprint(module)
    scalar = torch.nn.BatchNorm1d(2)
    others = [weights_fingerprint(m) for m in (module.double(), torch.nn.Sequential(module), scalar)]
    assert len({before, trained, *others}) == 5


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        (PROMPTS[:1], {}, "two or more prompts"),
        ([*PROMPTS, Prompt("nothing to see", ())], {}, "'nothing to see' has none"),
        (PROMPTS, {"batch_size": 0}, "batch_size=0"),
    ],
)
def test_what_cannot_be_measured_is_named(backbone, prompts, options, message):
    with pytest.raises(ValueError, match=message):
        measure_structure(backbone, Bright(), prompts, STEPS, **SIZE, **options)


def test_the_picture_has_curves_and_a_strip(profile, tmp_path):
    draw_structure(profile, tmp_path / "whole.png")
    profile.save(tmp_path / "structure.json")
    draw_structure(StructureProfile.load(tmp_path / "structure.json"), tmp_path / "curves.png")
    with Image.open(tmp_path / "whole.png") as whole, Image.open(tmp_path / "curves.png") as curves:
        assert whole.height > curves.height + 100 and min(curves.size) > 200
