"""Tests of `synchromesh/verify`."""
