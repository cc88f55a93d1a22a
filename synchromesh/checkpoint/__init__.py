"""State that outlives a step: checkpoints, and the move between two plans."""
