"""Measurement: seconds and bytes of programs and collectives."""
