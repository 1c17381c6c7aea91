"""``make observe``: the demo under load and faults, watched by a real Prometheus with our boards and rules."""
