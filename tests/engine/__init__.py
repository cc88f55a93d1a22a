"""Tests of `synchromesh/engine`."""
