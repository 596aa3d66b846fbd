"""Random numbers that depend on a counter and nothing else.

There is no state to keep or restore: a row draws the same numbers alone, in any batch, and when it
is computed again after preemption. The idea: Salmon et al., "Parallel random numbers: as easy as
1, 2, 3", SC 2011.
"""

from __future__ import annotations

_WORD = 2**64 - 1


def uniform(seed: int, row: int, position: int) -> float:
    """A double in [0, 1), a multiple of 2^-53, for the token at `position` of the output of `row`.

    All three are at least 0 and below 2^64.
    """
    bits = mix(mix(mix(seed) ^ row) ^ position)
    return (bits >> 11) * 2.0**-53  # a double holds 53 bits: with more it could round up to 1


def mix(value: int) -> int:
    """SplitMix64: spreads one integer over 64 bits; different integers stay different.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    value = (value + 0x9E3779B97F4A7C15) & _WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return value ^ (value >> 31)
