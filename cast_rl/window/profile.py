"""The structure profile of a model: when along the trajectory the facts of an image become fixed."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from cast_rl.scene_graph import SKILLS
from cast_rl.transitions import Kind
from cast_rl.window import agreement
from cast_rl.window.samplers import SlidingWindow, UniformWindow, WindowSampler, check_windows

FORMAT = 1
"""Of profiles, a part of their key; raise it when the same dependencies come to give another profile."""

ORDERS = ("random", "sliding")
MARKS = {1: "1", 0: "0", -1: "?"}


def digest(value: Any) -> str:
    """16 hexadecimal digits that stand for a value made of JSON's types."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Criterion:
    """When structure counts as formed: from the earliest step at which agreement stays at or above the threshold.

    Args:
        skills: the skills whose atoms are the structure of an image.
        threshold: of the agreement.
        corrected: for chance (Cohen's kappa); otherwise the share of equal decisions. From 0.6 on Landis and Koch
            (1977) call a kappa substantial.
    """

    skills: tuple[str, ...] = ("object", "count", "position")
    threshold: float = 0.6
    corrected: bool = True

    def __post_init__(self):
        object.__setattr__(self, "skills", tuple(self.skills))
        if not self.skills or not 0 < self.threshold <= 1:
            raise ValueError(f"a criterion needs a skill and a threshold in (0, 1], got {self}")


STRUCTURE = Criterion()


@dataclass(frozen=True, eq=False)
class StructureProfile:
    """Decisions about the atoms of P prompts, of at most K atoms each, at every one of T denoising steps.

    Step t is seen through the estimate of the clean image that the model has before it takes the step; the estimate at
    the last step is the final image.

    Args:
        depends: what the profile follows from, see `cast_rl.window.key.dependencies`.
        sigmas: the schedule, ``(T + 1,)``.
        texts: the prompts. skills: of each one's atoms.
        holds: ``(P, K, T)`` int8: 1 the atom holds, 0 it does not, -1 there is no such atom or nobody knows.
        similarity: ``(P, T)``, structural similarity of the low-passed image to the final one.
        similarity_by_chance: that of the final images of different prompts.
        strip: ``(n, T, 3, h, w)`` uint8, small pictures of the first n prompts; not saved.
    """

    depends: dict[str, Any]
    sigmas: Tensor
    texts: list[str]
    skills: list[list[str]]
    holds: Tensor
    similarity: Tensor
    similarity_by_chance: float
    strip: Tensor | None = field(default=None, repr=False)

    @property
    def key(self) -> str:
        """A digest of what the profile depends on."""
        return digest(self.depends)

    @property
    def steps(self) -> int:
        return len(self.sigmas) - 1

    @cached_property
    def skill_names(self) -> tuple[str, ...]:
        """The skills there are, in the order of `cast_rl.scene_graph.SKILLS`, others after."""
        there = {skill for row in self.skills for skill in row}
        return tuple(s for s in SKILLS if s in there) + tuple(sorted(there - set(SKILLS)))

    @cached_property
    def _tables(self) -> Tensor:
        """``(skills, P, T, 2, 2)``."""
        group = torch.zeros(self.holds.shape[:2], dtype=torch.int64)
        for p, row in enumerate(self.skills):
            for k, skill in enumerate(row):
                group[p, k] = self.skill_names.index(skill)
        return agreement.tally(self.holds, group, len(self.skill_names))

    @cached_property
    def _resampled(self) -> Tensor:
        """``(skills, R, T, 2, 2)``."""
        return agreement.resample(self._tables, seed=0)

    def _rows(self, skills: tuple[str, ...]) -> list[int]:
        rows = [self.skill_names.index(skill) for skill in skills if skill in self.skill_names]
        if not rows:
            raise ValueError(f"no atom of the profile has a skill of {list(skills)}; it has {list(self.skill_names)}")
        return rows

    def count(self, *skills: str) -> int:
        """How many atoms of these skills the final images were judged for."""
        return int(self._tables[self._rows(skills), :, -1].sum())

    def agreement(self, *skills: str, corrected: bool = True) -> Tensor:
        """Agreement of the decisions about atoms of these skills with those of the final image, ``(T,)``.

        Raises:
            ValueError: there are no such atoms.
        """
        measure = agreement.kappa if corrected else agreement.plain_agreement
        return measure(self._tables[self._rows(skills)].sum(1))

    def agreement_interval(self, *skills: str, corrected: bool = True) -> Tensor:
        """Bootstrap interval (95 %, over prompts) of `agreement`, ``(2, T)``."""
        measure = agreement.kappa if corrected else agreement.plain_agreement
        return agreement.interval(measure(self._resampled[self._rows(skills)]))

    def formed(self, criterion: Criterion = STRUCTURE) -> int:
        """The step at which the structure is formed; the steps before it are those that can still change it.

        Raises:
            ValueError: no atom of the criterion's skills was judged.
        """
        curve = self.agreement(*criterion.skills, corrected=criterion.corrected)
        if curve.isnan().any():
            raise ValueError(f"no final image was judged for an atom of {list(criterion.skills)}; see to the judge")
        return int(agreement.settled_from(curve, criterion.threshold))

    def formed_interval(self, criterion: Criterion = STRUCTURE) -> tuple[int, int]:
        """Bootstrap interval (95 %, over prompts) of `formed`, rounded outwards."""
        measure = agreement.kappa if criterion.corrected else agreement.plain_agreement
        curves = measure(self._resampled[self._rows(criterion.skills)])
        low, high = agreement.interval(agreement.settled_from(curves, criterion.threshold)).tolist()
        return int(low), -int(-high // 1)

    def candidates(self, criterion: Criterion = STRUCTURE) -> range:
        """The steps before the structure is formed."""
        return range(self.formed(criterion))

    def window(
        self,
        width: int,
        *,
        order: Literal["random", "sliding"] = "random",
        every: int = 1,
        criterion: Criterion = STRUCTURE,
        transition: Kind = "cps",
        a: float = 0.6,
    ) -> WindowSampler:
        """Windows of ``width`` consecutive steps among the candidates.

        Args:
            width: stochastic steps of a window.
            order: ``"random"``: drawn per group; ``"sliding"``: from the first candidates to the last and again, a
                step further every ``every`` iterations.
            criterion: when structure counts as formed.
            transition, a: of the stochastic steps.

        Raises:
            ValueError: fewer than ``width`` candidates, or one at which the transition must not inject noise.
        """
        steps = len(self.candidates(criterion))
        if not 1 <= width <= steps:
            raise ValueError(
                f"a window of {width} steps does not fit: the structure is formed at step {steps} of {self.steps}, so "
                f"{steps} steps come before it. Take a width from 1 to {steps}, more denoising steps, or set the "
                "window by hand"
            )
        check_windows(self.sigmas, range(steps - width + 1), width, transition=transition, a=a)
        if order not in ORDERS:
            raise ValueError(f"unknown order {order!r} of windows; choose {' or '.join(ORDERS)}")
        if order == "random":
            return UniformWindow(0, steps - width, width)
        return SlidingWindow(0, steps - width, width, every)

    def table(self, criterion: Criterion = STRUCTURE) -> str:
        """Agreement per skill and step, and when each settles by the criterion's threshold, as lines of text."""
        kind = "agreement beyond chance" if criterion.corrected else "share of equal decisions"
        low, high = self.formed_interval(criterion)
        lines = [
            f"{len(self.texts)} prompts, {self.steps} steps: {kind} with the final image. Settled: from then on at "
            f"least {criterion.threshold}.",
            self._line("step", range(self.steps), "d", "settles at"),
            self._line("sigma", self.sigmas[:-1].tolist(), ".2f", ""),
        ]
        groups = {skill: (skill,) for skill in self.skill_names} | {"structure": criterion.skills}
        for name, skills in groups.items():
            curve = self.agreement(*skills, corrected=criterion.corrected)
            when = agreement.settled_from(curve, criterion.threshold).item()
            lines.append(self._line(f"{name} ({self.count(*skills)})", curve.tolist(), ".2f", f"{when:.0f}"))
        lines[-1] += f" ({low} to {high})"
        lines.append(self._line("similarity", self.similarity.mean(0).tolist(), ".2f", ""))
        lines += [
            f"Structure: {', '.join(criterion.skills)}. In brackets: number of atoms; 95 % interval over prompts.",
            f"Similarity: of low-passed images; {self.similarity_by_chance:.2f} for final images of different prompts.",
        ]
        return "\n".join(lines)

    @staticmethod
    def _line(name: str, values, form: str, last: str) -> str:
        return (f"{name:>16s}" + "".join(f"{value:>6{form}}" for value in values) + f"  {last}").rstrip()

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON, its strip of pictures left out."""
        prompts = []
        for text, skills, rows, alike in zip(
            self.texts, self.skills, self.holds.tolist(), self.similarity.tolist(), strict=True
        ):
            marks = ["".join(MARKS[value] for value in row) for row in rows[: len(skills)]]
            prompts.append({"text": text, "skills": skills, "holds": marks, "similarity": alike})
        value = {
            "format": FORMAT,
            "key": self.key,
            "depends": self.depends,
            "sigmas": self.sigmas.tolist(),
            "similarity_by_chance": self.similarity_by_chance,
            "prompts": prompts,
        }
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.part")
        part.write_text(json.dumps(value, indent=1))
        os.replace(part, path)

    @classmethod
    def load(cls, path: str | Path) -> StructureProfile:
        """Read what `save` wrote.

        Raises:
            ValueError: the file is no profile, of another format, or was changed since.
        """
        try:
            value = json.loads(Path(path).read_text())
            profile = cls._from_json(value)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is no profile of format {FORMAT}: {error!r}. Measure it again") from error
        if value["key"] != profile.key:
            raise ValueError(
                f"the structure profile {path} has the key {value['key']}, but what it depends on has {profile.key}; "
                "it was changed by hand. Measure it again"
            )
        return profile

    @classmethod
    def _from_json(cls, value: dict[str, Any]) -> StructureProfile:
        if value["format"] != FORMAT:
            raise ValueError(f"format {value['format']}")
        codes = {mark: code for code, mark in MARKS.items()}
        prompts, steps = value["prompts"], len(value["sigmas"]) - 1
        holds = torch.full((len(prompts), max(len(p["holds"]) for p in prompts), steps), -1, dtype=torch.int8)
        for p, prompt in enumerate(prompts):
            for k, marks in enumerate(prompt["holds"]):
                holds[p, k] = torch.tensor([codes[mark] for mark in marks])
        return cls(
            depends=value["depends"],
            sigmas=torch.tensor(value["sigmas"]),
            texts=[p["text"] for p in prompts],
            skills=[p["skills"] for p in prompts],
            holds=holds,
            similarity=torch.tensor([p["similarity"] for p in prompts]),
            similarity_by_chance=value["similarity_by_chance"],
        )
