"""Tests of `synchromesh/planning`."""
