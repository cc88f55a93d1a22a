"""Tests: they mirror the package; `ranks.py` starts ranks, `models.py` holds the models."""
