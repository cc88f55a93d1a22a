"""Launching: the processes of a run on this host, how they find each other and end."""
