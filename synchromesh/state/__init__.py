"""State that outlives a step: checkpoints, the sample cursor, the move between two plans."""
