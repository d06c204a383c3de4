"""Model traces: the sizes and ready times of gradients, and their files. Pure: no process groups, no clock."""
