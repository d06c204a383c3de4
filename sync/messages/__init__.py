"""Messages: programs bound to the buffers of units that travel together."""
