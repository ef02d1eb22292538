"""Configurations drawn at random, uniformly in the space."""

from __future__ import annotations

from random import Random

from ..space import Space
from . import Candidate, Searcher

USES_MODEL = False

#: The search ends after this many consecutive draws of configurations that were tried already.
_MAX_DRAWS = 1000


class RandomSearch(Searcher):
    """Proposes the incumbent, then one random draw after another."""

    def __init__(self, space: Space, random_seed: int) -> None:
        super().__init__()
        self._space = space
        self._random = Random(random_seed)
        self._next = space.incumbent

    def ask(self) -> Candidate | None:
        for _ in range(_MAX_DRAWS):
            if self._next not in self._tried:
                return Candidate(self._next)
            self._next = self._space.from_point([self._random.random() for _ in range(self._space.dimensions)])
        return None


def make_searcher(space: Space, random_seed: int) -> Searcher:
    return RandomSearch(space, random_seed)
