"""What follows from a profile: when skills settle, which windows there are, and its file."""

import json
from collections import Counter

import pytest
import torch

from cast_rl.window import Criterion, SlidingWindow, StructureProfile, UniformWindow

SIGMAS = torch.cat([torch.linspace(1, 0.02, 10), torch.zeros(1)])


def profile(settles: dict[str, int], prompts: int = 40, steps: int = 10, sigmas=SIGMAS) -> StructureProfile:
    """Every skill says no before the step at which it settles, and is right from there on; one atom each."""
    final = torch.rand(prompts, len(settles), generator=torch.Generator().manual_seed(0)) > 0.5
    step = torch.arange(steps)
    right = step >= torch.tensor(list(settles.values()))[:, None]
    return StructureProfile(
        depends={"seed": 0},
        sigmas=sigmas,
        texts=[f"prompt {i}" for i in range(prompts)],
        skills=[list(settles)] * prompts,
        holds=(final[..., None] & right).to(torch.int8),
        similarity=torch.linspace(0.2, 1, steps).expand(prompts, -1),
        similarity_by_chance=0.25,
    )


@pytest.fixture
def late_colours():
    return profile({"object": 2, "count": 6, "position": 4, "attribute": 8})


def test_structure_is_formed_when_the_agreement_of_its_skills_stays(late_colours):
    assert late_colours.agreement("object").tolist() == [0.0] * 2 + [1.0] * 8
    assert late_colours.agreement("attribute", corrected=False)[0] == pytest.approx(0.5, abs=0.2)
    assert late_colours.formed(Criterion(("object",))) == 2
    assert late_colours.formed(Criterion(("object", "position"), threshold=0.9)) == 4
    assert late_colours.formed(Criterion(threshold=0.9)) == 6
    assert late_colours.formed(Criterion(("attribute",))) == 8
    assert late_colours.candidates() == range(late_colours.formed())
    low, high = late_colours.formed_interval(Criterion(threshold=0.9))
    assert low == high == 6
    band = late_colours.agreement_interval("object", "count", "position")
    curve = late_colours.agreement("object", "count", "position")
    assert (band[0] <= curve).all() and (curve <= band[1]).all() and (band[1] - band[0]).max() > 0.02


def test_the_table_says_when_each_skill_settles(late_colours):
    rows = {line.split()[0]: line.split() for line in late_colours.table(Criterion(threshold=0.9)).splitlines()}
    assert [rows[name][-1] for name in ("object", "attribute", "count", "position")] == ["2", "8", "6", "4"]
    assert rows["structure"][-4:] == ["6", "(6", "to", "6)"] and rows["structure"][1] == "(120)"
    assert rows["sigma"][1] == "1.00"


def test_windows_lie_before_structure_is_formed(late_colours):
    window = late_colours.window(2, criterion=Criterion(threshold=0.9))
    assert window == UniformWindow(0, 4, 2)
    drawn = Counter(window(7, iteration, group) for iteration in range(40) for group in range(5))
    assert set(drawn) == {0, 1, 2, 3, 4}
    assert window(7, 3, 1) == late_colours.window(2, criterion=Criterion(threshold=0.9))(7, 3, 1)
    slid = late_colours.window(5, order="sliding", every=3, criterion=Criterion(threshold=0.9))
    assert slid == SlidingWindow(0, 1, 5, 3)
    assert [slid(7, iteration, 4) for iteration in range(8)] == [0, 0, 0, 1, 1, 1, 0, 0]


@pytest.mark.parametrize(
    ("width", "options", "message"),
    [
        (0, {}, "0 steps does not fit"),
        (7, {}, "formed at step 6 of 10, so 6 steps come before it. Take a width from 1 to 6"),
        (2, {"order": "shuffled"}, "shuffled"),
        (2, {"transition": "flow_sde", "a": 3.0}, "must not take. Usable are"),
    ],
)
def test_windows_that_cannot_work_are_refused_with_the_reason(late_colours, width, options, message):
    with pytest.raises(ValueError, match=message):
        late_colours.window(width, criterion=Criterion(threshold=0.9), **options)


def test_late_steps_are_gated_on_the_noise_they_leave():
    late = profile({"object": 9})
    criterion = Criterion(("object",))
    assert late.window(3, criterion=criterion, transition="cps").starts == range(7)
    with pytest.raises(ValueError, match="steps 6 to 7 holds steps that flow_sde with a=0.9 must not take"):
        late.window(2, criterion=criterion, transition="flow_sde", a=0.9)


def test_structure_that_is_there_at_once_leaves_no_window():
    with pytest.raises(ValueError, match="formed at step 0 of 10"):
        profile({"object": 0}).window(1, criterion=Criterion(("object",)))


def test_skills_that_nobody_asked_for_are_named(late_colours):
    with pytest.raises(
        ValueError, match=r"skill of \['texture'\]; it has \['object', 'attribute', 'count', 'position'\]"
    ):
        late_colours.formed(Criterion(("texture",)))
    unknown = profile({"object": 3})
    unknown.holds[..., -1] = -1
    with pytest.raises(ValueError, match="no final image was judged"):
        unknown.formed(Criterion(("object",)))
    with pytest.raises(ValueError, match="threshold"):
        Criterion(threshold=0.0)


def test_a_file_gives_the_same_profile_back(late_colours, tmp_path):
    late_colours.holds[0, 0, 3] = -1
    late_colours.skills[1] = late_colours.skills[1][:2]
    late_colours.holds[1, 2:] = -1
    late_colours.save(tmp_path / "run" / "structure.json")
    read = StructureProfile.load(tmp_path / "run" / "structure.json")
    for name in ("holds", "similarity", "sigmas"):
        assert torch.equal(getattr(read, name), getattr(late_colours, name)), name
    assert (read.key, read.texts, read.skills) == (late_colours.key, late_colours.texts, late_colours.skills)
    assert read.table() == late_colours.table()


def test_files_that_are_no_profile_are_refused(late_colours, tmp_path):
    path = tmp_path / "structure.json"
    late_colours.save(path)
    value = json.loads(path.read_text())
    for change, message in [
        ({"depends": {"seed": 1}}, "changed by hand"),
        ({"format": 0}, "no profile of format 1.*format 0"),
        ({"prompts": [{"text": "x"}]}, "no profile"),
    ]:
        path.write_text(json.dumps(value | change))
        with pytest.raises(ValueError, match=message):
            StructureProfile.load(path)
    path.write_text("{")
    with pytest.raises(ValueError, match="structure.json is no profile"):
        StructureProfile.load(path)
