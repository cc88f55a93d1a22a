"""Clocks: seconds and bytes of programs and collectives on live ranks; profiles kept."""
