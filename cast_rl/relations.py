"""What relations between things mean: whether they are of place or of action, and which contradict each other."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}

# Predicates that order their ends along an axis: +1 if the subject comes first on it, -1 if the object does.
# Those of GenEval 2 ("to the left of", "on top of") and other spellings stand beside our own.
AXES = {
    "left of": ("left to right", 1),
    "to the left of": ("left to right", 1),
    "right of": ("left to right", -1),
    "to the right of": ("left to right", -1),
    "above": ("top to bottom", 1),
    "over": ("top to bottom", 1),
    "on": ("top to bottom", 1),
    "on top of": ("top to bottom", 1),
    "below": ("top to bottom", -1),
    "under": ("top to bottom", -1),
    "beneath": ("top to bottom", -1),
    "underneath": ("top to bottom", -1),
    "in front of": ("front to back", 1),
    "behind": ("front to back", -1),
    "inside": ("inner to outer", 1),
    "in": ("inner to outer", 1),
}
_INSIDE = ("inside", "in")
UNORDERED = ("next to", "beside", "near", "against")


@cache
def relation_skill(predicate: str) -> str:
    """``"verb"`` if the predicate begins with a present participle ("playing with"), ``"position"`` otherwise."""
    return "verb" if predicate.split(" ", 1)[0].endswith("ing") else "position"


def contradiction(relations: Iterable[tuple[int, str, int]]) -> list[int] | None:
    """Ends of relations that cannot all hold: a circle along one axis, such as a left of b left of a.

    What is inside a thing is where that thing is: if a is inside b, and b left of c, then a is left of c.

    Args:
        relations: triples of subject, predicate and object.

    Returns:
        the entities of the first circle found, in its order, or None if there is none.
    """
    relations = list(relations)
    held: dict[int, list[int]] = {}
    for subject, predicate, other in relations:
        if predicate in _INSIDE:
            held.setdefault(other, []).append(subject)
    axes: dict[str, dict[int, list[int]]] = {}
    for subject, predicate, other in relations:
        if predicate in AXES:
            axis, sign = AXES[predicate]
            first, second = (subject, other) if sign > 0 else (other, subject)
            if held and predicate not in _INSIDE:
                firsts, seconds = _with_contents(first, held), _with_contents(second, held)
            else:
                firsts, seconds = [first], [second]
            for before in firsts:
                axes.setdefault(axis, {}).setdefault(before, []).extend(seconds)
    for after in axes.values():
        circle = _circle(after)
        if circle:
            return circle
    return None


def _with_contents(thing: int, held: dict[int, list[int]]) -> list[int]:
    """A thing and all that is inside it, at any depth."""
    found = [thing]
    for container in found:  # grows on the way
        found += [inner for inner in held.get(container, ()) if inner not in found]
    return found


def _circle(after: dict[int, list[int]]) -> list[int] | None:
    """A circle of the graph ``{node: successors}``, by depth-first search."""
    done: set[int] = set()

    def visit(node: int, path: list[int]) -> list[int] | None:
        if node in path:
            return path[path.index(node) :]
        if node in done:
            return None
        for following in after.get(node, ()):
            circle = visit(following, [*path, node])
            if circle:
                return circle
        done.add(node)
        return None

    for start in after:
        circle = visit(start, [])
        if circle:
            return circle
    return None
