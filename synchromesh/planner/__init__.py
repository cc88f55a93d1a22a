"""The planner: the plan with the least predicted cost. Not here yet."""
