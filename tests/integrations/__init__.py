"""Tests of `synchromesh/integrations`."""
