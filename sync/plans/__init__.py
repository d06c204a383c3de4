"""Plans: which program and compressor each parameter gets. Pure: no process groups, no clock."""
