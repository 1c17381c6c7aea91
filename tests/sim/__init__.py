"""A deterministic simulation of whole clusters; docs/simulation.md says what is real in it and what is not."""
