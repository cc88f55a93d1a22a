"""Tests of `synchromesh/runs`."""
