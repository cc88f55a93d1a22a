"""Tests of `synchromesh/trace/partition`."""
