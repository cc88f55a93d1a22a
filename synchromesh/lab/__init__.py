"""The lab: emulated hosts on one machine. Not here yet."""
