"""Tests of the room `study`."""
