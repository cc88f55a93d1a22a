"""A caution: a warning that has the user's line as its place, not one of this package."""

import sys
import warnings

from synchromesh.values.fault import PACKAGE


def caution(text: str) -> None:
    frame, level = sys._getframe(), 1  # from Python 3.12 on skip_file_prefixes does it
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)
