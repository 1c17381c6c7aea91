"""refitd: fault-tolerant elastic refit, shard to shard."""
