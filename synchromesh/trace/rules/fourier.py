"""Rules for Fourier transforms: linear, and by every dim but those that they transform."""

from collections.abc import Iterator

from synchromesh.trace.rules.operator import Choice, Operator, dim_of
from synchromesh.trace.rules.views import mapped


def transform(op: Operator) -> Iterator[Choice]:
    """Transforms along one dim (`dim`), two or several; shifts, which move entries along `dim`."""
    n = len(op.inputs[0].shape)
    given, sizes = op.constant("dim"), op.constant("s")
    if given is None:  # the last dims, as many as there are sizes
        given = range(n) if sizes is None else range(n - len(sizes), n)
    worked = {
        dim_of(d, op.inputs[0].shape) for d in ([given] if isinstance(given, int) else given)
    }
    yield from mapped(op, [None if d in worked else d for d in range(n)])


KINDS = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
RULES = dict.fromkeys(
    (
        *(f"fft_{kind}{dims}" for kind in KINDS for dims in ("", "2", "n")),
        "fft_fftshift",
        "fft_ifftshift",
    ),
    transform,
)
