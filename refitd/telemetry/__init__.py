"""Metrics, logs and what the service manager is told. Nothing is imported before it is asked for."""
