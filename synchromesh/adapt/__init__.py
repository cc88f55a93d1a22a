"""Adaptation: a better plan while training runs."""
