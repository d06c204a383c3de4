"""Plans: the program and compressor of each unit. Pure: no process groups, no clock."""
