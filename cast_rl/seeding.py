"""Seeds as pure functions of named integers, so that a resumed run, a rank and a single row can agree."""

from numpy.random import SeedSequence


def derive_seed(*words: int) -> int:
    """A 63-bit seed that depends on every word and on their order.

    Args:
        words: integers in ``[0, 2^64)``, e.g. ``(run seed, stream, iteration, rank, row)``.

    Raises:
        ValueError: if a word is out of range.

    Source: NumPy's ``SeedSequence`` (O'Neill's seed_seq alternative), which avalanches all of its input.
    """
    if any(not 0 <= word < 2**64 for word in words):
        raise ValueError(f"derive_seed takes integers in [0, 2^64), got {words}; use a seed >= 0")
    # SeedSequence pads with zeros and splits large integers: fixed-size words keep the reading unique.
    halves = [half for word in words for half in (word & 0xFFFFFFFF, word >> 32)]
    low, high = SeedSequence([len(words), *halves]).generate_state(2)
    return (int(high) << 32 | int(low)) & (2**63 - 1)
