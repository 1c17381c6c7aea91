"""Edges between hosts by NCCL: one communicator a lane and token, grouped calls over packed buckets."""
