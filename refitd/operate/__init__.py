"""What people and scripts do with a running job: look at it, pause it, cap it, drain a node. docs/operations.md."""
