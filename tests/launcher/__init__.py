"""Tests of `synchromesh/launch`."""
