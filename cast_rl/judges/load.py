"""From a name to a judge."""

from __future__ import annotations

from cast_rl.judges.base import Judge


def load_judge(source: str) -> Judge:
    """The judge that ``source`` names: ``"oracle"``, the miniature's exact one, or ``"soft_oracle"``, an unsure one.

    Raises:
        ValueError: an unknown name, with the known ones.
    """
    if source == "oracle":
        # Here, not above: the miniature brings diffusers and scipy along, which other judges do without.
        from cast_rl.miniature.oracle import Oracle

        return Oracle()
    if source == "soft_oracle":
        from cast_rl.miniature.soft_oracle import SoftOracle

        return SoftOracle()
    raise ValueError(
        f"unknown judge {source!r}; known: 'oracle', the exact judge of the miniature, 'soft_oracle', an unsure one. "
        "In Python any callable with the protocol of cast_rl.judges.Judge can be given to AtomRewardTransform"
    )
