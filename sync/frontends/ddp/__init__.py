"""The front end of DDP models."""
