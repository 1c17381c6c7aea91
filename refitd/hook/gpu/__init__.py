"""GPU memory lent to another process: what the owner does. Imports CUDA's bindings only when it is used."""
