"""Training the miniature's judge: what it is shown, asked and taught, and what comes out."""

import random
from collections import Counter, defaultdict

import pytest
import torch
from torch import nn
from transformers import Qwen3VLForConditionalGeneration

from cast_rl.backbones import load_backbone
from cast_rl.judges import load_judge
from cast_rl.judges.chat import Chat
from cast_rl.judges.packing import pack
from cast_rl.miniature import GENERATOR, GUIDANCE, Oracle, miniature_prompts, pretrain_judge
from cast_rl.miniature.fit import Recipe, fit
from cast_rl.miniature.judge_batches import Asker, Batch, augment, pool
from cast_rl.miniature.judge_data import Source, draw, found_in, judge_images, label, prompts_of
from cast_rl.miniature.judge_model import GRID, LOOKING, NUMBERS, build_judge_tokenizer
from cast_rl.miniature.judge_quality import judge_figures, pointing, roc_auc
from cast_rl.miniature.judge_questions import SKILL_WEIGHTS, altered, ask, described
from cast_rl.miniature.muon import BatchedMuon
from cast_rl.miniature.oracle import check, parse
from cast_rl.miniature.pretrain_judge import WEIGHTS, Learner, sight, split_parameters, train_judge
from cast_rl.miniature.render import SIZE, render_graphs
from cast_rl.miniature.vocabulary import COLORS, SHAPES, is_held_out
from cast_rl.scene_graph import Entity, Relation, SceneGraph, plural

SCENES = Source("render", 1, 60)


@pytest.fixture(scope="module")
def tokenizer():
    return build_judge_tokenizer()


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    return judge_images(GENERATOR, tmp_path_factory.mktemp("scenes"), (SCENES,))


@pytest.fixture
def learner(tokenizer):
    return Learner(tokenizer).train()


@pytest.fixture(scope="module")
def chat(tokenizer):
    image, end = (tokenizer.convert_tokens_to_ids(t) for t in ("<|image_pad|>", "<|vision_end|>"))
    return Chat(tokenizer, image, end)


def test_every_word_and_every_spelling_of_an_answer_is_one_token(tokenizer):
    for word in (*SHAPES, *map(plural, SHAPES), *COLORS, "above", "image", "objects", "there"):
        assert len(tokenizer.encode(f" {word}")) == 1, word
    for word in (*NUMBERS, "yes", "no"):
        for form in (word, word.capitalize()):
            assert len(tokenizer.encode(form)) == len(tokenizer.encode(f" {form}")) == 1, form
    question = "Are there any red circles in the image? Answer in one word."
    assert len(tokenizer.encode(question)) == len(question.split()) + 2


def test_training_images_show_no_pair_of_kinds_that_is_held_out():
    for kind in ("render", "sample", "rollout"):
        graphs = prompts_of(kind, 0, 40)
        assert len(graphs) == 40 and not any(map(is_held_out, graphs))
        assert graphs != prompts_of(kind, 1, 40)


def test_labels_give_back_what_the_oracle_finds(scenes):
    images = scenes["render"]
    found = parse(images.pixels[:10] / 255)
    for n, objects in enumerate(found):
        again = found_in(images.objects[n])
        assert [(o.shape, o.color) for o in again] == [(o.shape, o.color) for o in objects]
        for atom in images.prompts[n].atoms():
            assert check(atom, again)[0] == check(atom, objects)[0]
        for m, o in enumerate(objects):
            assert ((images.regions[n] == m + 1).numpy() == o.mask).mean() > 0.999


def test_an_augmented_image_shows_what_its_labels_say(scenes, monkeypatch):
    monkeypatch.setattr("cast_rl.miniature.judge_batches.NOISE", 0.0)
    monkeypatch.setattr("cast_rl.miniature.judge_batches.BLURRED", 0.0)
    images = scenes["render"]
    pixels, objects, regions = augment(images.pixels[:40], images.objects[:40], images.regions[:40])
    again = label(pixels)
    moved = (pixels - images.pixels[:40] / 255).flatten(1).abs().amax(1)
    assert (moved > 0.3).float().mean() > 0.8
    for n in range(40):
        mine, theirs = (sorted(map(tuple, o[o[:, 0] >= 0].tolist())) for o in (objects[n], again["objects"][n]))
        assert torch.allclose(torch.tensor(mine), torch.tensor(theirs), atol=0.3), n
    assert ((regions > 0) == (again["regions"] > 0)).float().mean() > 0.995


def test_questions_are_answered_truly_and_ask_for_both_answers(scenes):
    images, rng = scenes["render"], random.Random(0)
    answers = defaultdict(Counter)
    for n, prompt in enumerate(images.prompts):
        objects = found_in(images.objects[n])
        asked, caption = ask(prompt, objects, 9, rng)
        assert len(asked) == len({a.question for a in asked}) <= 9 and caption.render()[0]
        true = {a.question: a for graph in (prompt, described(objects, rng)) for a in graph.atoms()}
        for a in asked:
            answers[a.skill][a.answer] += 1
            if (atom := true.get(a.question)) is not None and a.skill != "position":
                assert (a.answer == atom.answer) == check(atom, objects)[0]
    assert set(answers) == set(SKILL_WEIGHTS)
    for skill in ("object", "attribute", "position"):
        share = answers[skill]["Yes"] / answers[skill].total()
        assert set(answers[skill]) == {"Yes", "No"} and 0.3 < share < 0.7, (skill, share)
    assert answers["count"].most_common(1)[0][1] < 0.6 * answers["count"].total() and answers["count"]["zero"]


def test_altering_a_scene_changes_every_part_of_it_at_times():
    rng = random.Random(0)
    kinds = (Entity("circle", 2, ("red",)), Entity("square", 1, ("blue",)))
    graph = SceneGraph(kinds, (Relation(0, "above", 1),), closed=True)
    seen = [altered(graph, rng) for _ in range(60)]
    first = [g.entities[0] for g in seen]
    assert {e.noun for e in first} > {"circle"} and {e.attributes for e in first} > {("red",)}
    assert {e.count for e in first} == {1, 2, 3} and {g.relations[0].predicate for g in seen} > {"above"}


@pytest.mark.parametrize("rollout", [False, True])
def test_samples_are_a_function_of_the_seed_and_the_pipelines_own_without_noise(rollout):
    texts = miniature_prompts(2, seed=0, held_out=False).texts
    backbone = load_backbone(GENERATOR, guidance=GUIDANCE)
    images = draw(backbone, texts, 5, rollout=rollout)
    assert torch.equal(images, draw(backbone, texts, 5, rollout=rollout))
    out = backbone.pipe(
        prompt=texts, negative_prompt=[" "] * 2, true_cfg_scale=GUIDANCE, height=SIZE, width=SIZE, output_type="pt",
        num_inference_steps=10, generator=[torch.Generator().manual_seed(5 + i) for i in range(2)],
    )  # fmt: skip
    difference = (images - out.images).abs().max()
    assert (difference < 1e-4) != rollout


def looks(learner, chat, graph, image_graph, question):
    """Where the words of a caption and a question should look in a scene: word -> shares ``(1 + N,)``."""
    found = label(render_graphs([image_graph], 3))
    cover = pool(found["regions"], found["objects"].shape[1])
    branches = [[chat.caption(graph.render()[0]), chat.question(question)]]
    packed = pack([[b.ids for b in branches[0]]])
    batch = Batch(found["pixels"], found["objects"], found["regions"], cover, branches, [[]])
    where, share = learner.words.targets(batch, packed)
    out = {}
    for (_, t), row in zip(where.tolist(), share, strict=True):
        word = chat.tokenizer.decode(int(packed.ids[0, t])).strip()
        out["caption" if packed.branch[0, t] == 0 else "question", word] = row
    return out, cover[0], found["objects"][0]


def test_words_are_taught_to_look_at_what_they_name(learner, chat):
    scene = SceneGraph((Entity("circle", 2, ("red",)), Entity("square", 1, ("blue",))), (), True)
    wrong = SceneGraph((Entity("circle", 2, ("green",)), Entity("cross", 1, ("blue",))), (), True)
    rows, cover, objects = looks(learner, chat, wrong, scene, "How many red crosses are in the image?")
    circles = cover[(objects[:, 0] == SHAPES.index("circle")).nonzero()[:, 0]].sum(0)
    square = cover[(objects[:, 1] == COLORS.index("blue")).nonzero()[:, 0]].sum(0)
    assert torch.allclose(rows["caption", "circles"][1:], circles / circles.sum()), "another colour will do"
    assert torch.allclose(rows["caption", "blue"][1:], square / square.sum())
    assert torch.allclose(rows["caption", "two"][1:], (circles + square) / (circles + square).sum())
    assert ("caption", "cross") not in rows and ("caption", "green") not in rows
    assert torch.allclose(rows["question", "red"][1:], circles / circles.sum())
    assert rows["question", "crosses"][0] == 1 and rows["question", "crosses"][1:].sum() == 0
    assert ("question", "one") not in rows


def test_a_few_steps_on_one_batch_lower_every_term_of_the_loss(learner, chat, tokenizer, scenes):
    torch.manual_seed(0)
    batch = Asker(tokenizer, chat, scenes)(0, 6)
    matrices, rest = split_parameters(learner, set(learner.parameters()))
    assert {id(p) for p in matrices + rest} == {id(p) for p in learner.parameters()}
    muon, adam = BatchedMuon(matrices, 1e-2), torch.optim.AdamW(rest, 2e-3)
    losses = []
    for _ in range(7):
        terms = learner.loss(batch, chat)
        losses.append({name: value.item() for name, value in terms.items()})
        sum(terms.values()).backward()
        assert all(p.grad is not None for p in learner.parameters())
        for optimizer in (muon, adam):
            optimizer.step()
            optimizer.zero_grad()
    for name in WEIGHTS:
        assert losses[-1][name] < 0.85 * losses[0][name], (name, losses)


def test_the_vision_tower_learns_by_itself_what_it_teaches_the_whole(learner, tokenizer, chat, scenes):
    torch.manual_seed(0)
    batch = Asker(tokenizer, chat, scenes)(0, 3)
    alone, whole = learner.see(batch), learner.loss(batch, chat)
    assert set(alone) < set(whole) == set(WEIGHTS)
    for name, value in alone.items():
        assert value.item() == pytest.approx(whole[name].item(), rel=1e-5)
    sum(alone.values()).backward()
    reached = {p for p in learner.parameters() if p.grad is not None}
    assert reached == sight(learner)


class Killed(Exception):
    pass


def test_a_run_that_was_killed_resumes_to_the_same_weights(tmp_path):
    def run(folder, kill_at=None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 1))

        def terms_of_step(step):
            if step == kill_at:
                raise Killed
            return {"error": (model(torch.randn(8, 4)) - 1).pow(2).mean()}

        weights = [p for p in model.parameters() if p.ndim == 2]
        biases = [p for p in model.parameters() if p.ndim == 1]
        return fit(model, weights, biases, terms_of_step, Recipe(12, save_every=5), folder), model

    whole = run(tmp_path / "whole")
    with pytest.raises(Killed):
        run(tmp_path / "parts", kill_at=8)
    resumed = run(tmp_path / "parts")
    for a, b in zip(whole, resumed, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(whole[0][0].weight, whole[1][0].weight), "the average is not the last step's weights"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two trainings of four steps, one of which was killed after three: their folders."""
    folder = tmp_path_factory.mktemp("trained")

    def run(name):
        options = {"steps": 4, "sight_steps": 2, "save_every": 2, "sources": (SCENES,), "batch": 3}
        train_judge(GENERATOR, folder / name, folder / name / "judge_folder", **options)

    class Dies(Asker):
        def __call__(self, step, batch, *, ask=True):
            if step == 3:
                raise Killed
            return super().__call__(step, batch, ask=ask)

    run("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain_judge, "Asker", Dies)
        with pytest.raises(Killed):
            run("parts")
    assert not (folder / "parts" / "judge_folder").exists()
    run("parts")
    return folder


def test_a_killed_training_of_the_judge_resumes_to_the_same_weights(trained):
    whole, parts = ((trained / name / "judge_folder" / "model.safetensors").read_bytes() for name in ("whole", "parts"))
    assert whole == parts


def test_the_result_is_a_small_folder_that_transformers_loads(trained):
    folder = trained / "whole" / "judge_folder"
    files = [f for f in folder.rglob("*") if f.is_file()]
    assert sum(f.stat().st_size for f in files) <= 8e6
    assert {f.suffix for f in files} <= {".json", ".safetensors", ".jinja"}
    model, info = Qwen3VLForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert sum(p.numel() for p in model.parameters()) <= 3e6


@pytest.mark.filterwarnings("ignore:no words of the prompt")  # the scene's atom is stated by no word
def test_the_result_judges_and_shows_evidence_of_the_heads_that_were_taught(trained):
    judge = load_judge(trained / "whole" / "judge_folder")
    assert judge.evidence.heads == LOOKING
    prompts = miniature_prompts(3, seed=1, held_out=True)
    graphs = [p.graph for p in prompts]
    said = judge(render_graphs(graphs, 0), [p.atoms for p in prompts])
    assert said.mask.sum() == sum(len(p.atoms) for p in prompts)
    assert said.evidence.shape[2:] == (GRID, GRID)
    assert torch.allclose(said.evidence[said.mask].mean((1, 2)), torch.ones(()), atol=1e-4)


def test_figures_of_a_perfect_and_of_a_blind_judge():
    graphs = [p.graph for p in miniature_prompts(24, seed=2, held_out=True)]
    images = render_graphs(graphs, 0)
    images = torch.cat([images[:12], images[12:].roll(1, 0)])  # half of them show another prompt

    def blind(images, atoms):
        said = Oracle()(images, atoms)
        said.scores = torch.rand(said.scores.shape, generator=torch.Generator().manual_seed(0))
        said.evidence = torch.ones(*said.scores.shape, GRID, GRID)
        said.mask[:, 0] = False
        return said

    best, worst = (judge_figures(judge, graphs, images, batch=10) for judge in (Oracle(), blind))
    assert set(best["auc"].values()) == {1.0} and best["correlation"] == 1.0
    assert best["hits"] == 1.0 and min(best["mass"].values()) > 5 and best["unjudged"] == 0
    assert all(0.2 < value < 0.8 for value in worst["auc"].values()) and worst["correlation"] < 0.6
    assert all(value == pytest.approx(1, abs=0.02) for value in worst["mass"].values())
    assert worst["hits"] < 0.5 and 0 < worst["unjudged"] < 0.2


def test_the_area_under_the_curve_counts_ties_half():
    labels = torch.tensor([True, False, True, False])
    assert roc_auc(torch.tensor([0.9, 0.1, 0.8, 0.2]), labels) == 1
    assert roc_auc(torch.tensor([0.1, 0.9, 0.1, 0.9]), labels) == 0
    assert roc_auc(torch.tensor([0.5, 0.5, 0.9, 0.5]), labels) == 0.75
    assert roc_auc(torch.ones(2), torch.tensor([True, True])) != roc_auc(torch.ones(2), torch.tensor([True, True]))


def test_pointing_measures_mass_share_and_hits():
    region = torch.zeros(3, 2, 2)
    region[:, 0, 0] = 1.0
    evidence = torch.tensor([[[3.0, 1], [0, 0]], [[1, 3], [0, 0]], [[0, 0], [0, 0]]])
    mass, share, hit = pointing(evidence, region)
    assert mass.tolist() == [0.75, 0.25, 0.0] and share.tolist() == [0.25] * 3 and hit.tolist() == [1, 0, 0]
