"""Adaptation: a better plan while training runs. Not here yet."""
