"""Tests of `synchromesh/programs`."""
