"""Stages: where a chain is cut, on which devices, and the plans that come of it."""
