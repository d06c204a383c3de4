"""The front end of models that FSDP2 averages over replicas, with shards or without."""
