"""A seeded sample of mutants, and what its score says about all of them."""

import math
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Z_95 = 1.959964


@dataclass(frozen=True, slots=True)
class Mutant:
    """One small wrong change."""

    path: str
    kind: str
    operator: str
    occurrence: int
    """Of what cosmic-ray's operator finds in the file, from 0."""
    start: tuple[int, int]
    end: tuple[int, int]
    first_line: int
    """Of the statement's own lines; 0 where importing the file runs it."""
    last_line: int


def shuffled_places(mutants: Sequence[Mutant], seed: int) -> Iterator[Mutant]:
    """Yield one mutant of every place, places in random order, each place's own mutant drawn at random.

    A place is an expression and a kind of change. Without this the six ways to change one comparison would count six
    times, and most mutants would be of files that compare much.
    """
    rng = random.Random(seed)  # noqa: S311  a sample, not a secret
    of_place: dict[tuple[str, tuple[int, int], tuple[int, int], str], list[Mutant]] = defaultdict(list)
    for mutant in mutants:
        of_place[mutant.path, mutant.start, mutant.end, mutant.kind].append(mutant)
    places = sorted(of_place)
    rng.shuffle(places)
    for place in places:
        yield rng.choice(sorted(of_place[place], key=lambda mutant: (mutant.operator, mutant.occurrence)))


def interval(num_noticed: int, num_asked: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share; (0, 1) where nothing was asked."""
    if num_asked == 0:
        return 0.0, 1.0
    share, z2 = num_noticed / num_asked, Z_95**2
    centre = share + z2 / (2 * num_asked)
    spread = Z_95 * math.sqrt(share * (1 - share) / num_asked + z2 / (4 * num_asked**2))
    whole = 1 + z2 / num_asked
    return (centre - spread) / whole, (centre + spread) / whole
