"""The planner: what a plan is wanted for, what it costs, and how it is worded."""
