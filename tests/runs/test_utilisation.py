"""Utilisation of a process that computes, and of one that sleeps."""

import time

import torch

from synchromesh.runs.utilisation import Utilisation


def test_computing_and_sleeping() -> None:
    with Utilisation(torch.device("cpu")) as asleep:
        time.sleep(0.1)
    with Utilisation(torch.device("cpu")) as used:
        began = time.process_time()
        while time.process_time() - began < 0.1:
            pass
        assert used.so_far() is not None
    assert asleep.share is not None and used.share is not None
    assert asleep.share < 0.5 * used.share
