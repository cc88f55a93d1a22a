"""The decision: every search and exact price in one sequence, measured or estimated."""
