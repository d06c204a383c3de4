"""The fronts: the hook of DistributedDataParallel, the synchronizer, and the checks before anything is built."""
