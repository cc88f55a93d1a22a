"""Streams of random numbers: the default generator, seeded anew before every random operator.

The seed is a hash of (seed, step, micro-batch, component, data index, operator[, tensor
index]): nothing needs saving, recomputation draws the same bits, ranks that hold the same values
draw the same, and ranks that hold other rows or another shard draw others. What is drawn once for
all rows of a batch is of no data index and no single micro-batch."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_MASK = (1 << 64) - 1


def mix(state: int, value: int) -> int:
    """One step of splitmix64 (Steele et al. 2014, https://doi.org/10.1145/2660193.2660195)."""
    z = ((state ^ (value & _MASK)) + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


class RandomStreams:
    """`begin` names the step, `at` the place in it, `seed` the operator about to draw."""

    def __init__(self, seed: int, device: torch.device | None = None) -> None:
        self._device = device
        self._root = mix(0, seed)
        self._step = self._root  # of draws for rows
        self._batch = self._root  # of draws for all rows of a batch
        self._at = 0, 0, 0  # component, data index, tensor index

    def copy(self) -> "RandomStreams":
        twin = RandomStreams(0, self._device)
        twin._root = twin._step = twin._batch = self._root
        return twin

    def begin(self, step: int, first: int = 0, index: int = 0) -> None:
        """Names a micro-batch: `index` among the pieces, counted from `first`."""
        before = mix(self._root, step)
        self._step, self._batch = mix(before, first + index), mix(before, first)

    def at(self, component: int, data_index: int, tensor_index: int) -> None:
        self._at = component, data_index, tensor_index  # most components draw nothing

    def seed(self, key: int, sharded: bool, rows: bool = True) -> None:
        """Seeds torch's generators for operator `key`; sharded, rows: another draw for each."""
        component, data_index, tensor_index = self._at
        of_rows = mix(mix(self._step, component), data_index)
        number = mix(of_rows if rows else mix(mix(self._batch, component), -1), key)
        if sharded:  # + 1: the first shard's draw is not the unsharded one
            number = mix(number, tensor_index + 1)
        torch.default_generator.manual_seed(number)
        generator = self._accelerator()
        if generator is not None:
            generator.manual_seed(number)

    @contextmanager
    def preserved(self) -> Iterator[None]:
        host, generator = torch.get_rng_state(), self._accelerator()
        device = generator.get_state() if generator is not None else None
        try:
            yield
        finally:
            torch.set_rng_state(host)
            if generator is not None and device is not None:
                generator.set_state(device)

    def _accelerator(self) -> torch.Generator | None:
        if self._device is None or self._device.type != "cuda":
            return None
        torch.cuda.init()
        index = self._device.index
        here = torch.cuda.current_device() if index is None else index
        return torch.cuda.default_generators[here]
