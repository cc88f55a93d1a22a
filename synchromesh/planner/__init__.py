"""The planner: the plan with the least predicted step time, as an exact search over a chain."""
