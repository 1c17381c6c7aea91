"""The version of what `make_plan` computes: members list what they can, and equal versions give equal plans."""

PLANNER_VERSION = 6
