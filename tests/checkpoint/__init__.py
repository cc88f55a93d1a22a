"""Tests of `synchromesh/checkpoint`."""
