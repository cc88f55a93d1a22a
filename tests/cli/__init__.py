"""Tests of `synchromesh/cli`."""
