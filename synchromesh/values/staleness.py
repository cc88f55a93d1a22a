"""Staleness: how old gradients are by which servers step."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Staleness:
    """Of gradients, how many updates of others came between what each was computed on and its own.

    lead: steps that a worker was ahead of the slowest when one of its gradients came, at most.
    histogram: how many gradients had the age 0, 1, ..."""

    mean: float
    max: int
    lead: int
    histogram: tuple[int, ...]

    @classmethod
    def of(cls, ages: Mapping[int, int], lead: int) -> "Staleness":
        """ages: how many gradients had which."""
        count, most = sum(ages.values()), max(ages, default=0)
        mean = sum(age * n for age, n in ages.items()) / count if count else 0.0
        histogram = (ages.get(age, 0) for age in range(most + 1 if ages else 0))
        return cls(mean, most, lead, tuple(histogram))

    @property
    def shares(self) -> tuple[float, ...]:
        """Of all gradients, by age."""
        count = sum(self.histogram) or 1
        return tuple(n / count for n in self.histogram)
