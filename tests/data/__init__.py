"""Tests of `synchromesh/data`."""
