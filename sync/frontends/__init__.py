"""Entry points: the DDP hook, the synchronizer, and the checks before anything is built."""
