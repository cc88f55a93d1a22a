"""Programs: what runs a component in one process, without process groups, and times it."""
