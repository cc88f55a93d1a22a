"""Tests of `synchromesh/lab`."""
