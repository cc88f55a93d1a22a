"""Tests of `synchromesh/training`."""
