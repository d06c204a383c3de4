"""The front ends of models of FSDP2: shards over all ranks, and replicas with shards or without."""
