"""Utilisation of a process that computes, and of one that sleeps."""

import time

import torch

from synchromesh.runs.utilisation import Utilisation


def test_computing_and_sleeping() -> None:
    asleep = Utilisation(torch.device("cpu"))
    time.sleep(0.1)
    of_sleep = asleep.end()
    used = Utilisation(torch.device("cpu"))
    began = time.process_time()
    while time.process_time() - began < 0.1:
        pass
    of_work = used.end()
    assert of_sleep is not None and of_work is not None
    assert of_sleep < 0.5 * of_work
