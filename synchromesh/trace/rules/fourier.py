"""Rules for Fourier transforms: linear, and by every dim but those that they transform."""

from collections.abc import Iterator

from synchromesh.trace.nodes import dims_of

from .operator import Operator, OpSpec


def transform(op: Operator) -> Iterator[OpSpec]:
    """Transforms along one dim (`dim`), two or several; shifts, which move entries along `dim`."""
    n = len(op.inputs[0].shape)
    given, sizes = op.constant("dim"), op.constant("s")
    if given is None:  # the last dims, as many as there are sizes
        given = range(n) if sizes is None else range(n - len(sizes), n)
    yield from op.on_entries(op.along(*dims_of(given, n), linear=True))


KINDS = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
NAMES = [f"fft_{kind}{dims}" for kind in KINDS for dims in ("", "2", "n")]
RULES = dict.fromkeys((*NAMES, "fft_fftshift", "fft_ifftshift"), transform)
