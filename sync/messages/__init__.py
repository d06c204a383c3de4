"""Messages: programs tied to the buffers of units that travel together."""
