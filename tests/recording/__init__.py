"""Tests of adaptation: monitor, policy, adapter."""
