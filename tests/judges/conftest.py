"""Checkpoints of tiny judges and what is asked of them."""

import pytest
import torch
from judge_reference import Reference
from tiny_judges import BUILDERS, save_judge

from cast_rl.judges import VLMJudge, load_judge
from cast_rl.scene_graph import Entity, Relation, SceneGraph


@pytest.fixture(scope="session")
def judge_folders(tmp_path_factory):
    """Kind -> folder of a random checkpoint, made when it is first asked for."""
    made = {}

    def folder(kind):
        if kind not in made:
            made[kind] = save_judge(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return folder


@pytest.fixture(scope="session")
def make_judge(judge_folders):
    """``make_judge(kind, **options)``: judges of other settings over one loaded model of a kind."""
    loaded = {}

    def make(kind="qwen3_vl", **options):
        if kind not in loaded:
            loaded[kind] = load_judge(judge_folders(kind))
        judge = loaded[kind]
        return VLMJudge(judge.family, judge.tokenizer, judge.images, **options)

    return make


@pytest.fixture(scope="session")
def references(judge_folders):
    """Kind -> the same checkpoint under the protocol as published."""
    made = {}

    def reference(kind):
        if kind not in made:
            made[kind] = Reference(judge_folders(kind), kind)
        return made[kind]

    return reference


@pytest.fixture(params=BUILDERS)
def kind(request):
    return request.param


@pytest.fixture
def reference(kind, references):
    return references(kind)


def graphs():
    pair = (Entity("circle", 2, ("red",)), Entity("square", 1, ("blue",)))
    return [
        SceneGraph(pair, (Relation(0, "left of", 1),)),
        SceneGraph((Entity("cross", 3, ("purple",)),)),
        SceneGraph((Entity("triangle", None, ("green",)), Entity("circle", 1, ("yellow",)))),
    ]


@pytest.fixture
def atoms():
    """Atoms of three prompts: 7, 3 and 5."""
    return [list(graph.atoms()) for graph in graphs()]


@pytest.fixture
def images():
    """Three images of 8-bit values, ``(3, 3, 32, 40)``, all of whose sides are multiples of an image token's 8."""
    return torch.randint(0, 256, (3, 3, 32, 40), generator=torch.Generator().manual_seed(7)).float() / 255
