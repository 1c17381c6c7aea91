"""Faults by the hundred on a running cluster of real processes: ``python -m refitd.demo.chaos``."""
