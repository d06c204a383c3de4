"""Programs: the steps in which a unit is synchronised, as data. Pure: no tensors, no process groups, no clock."""
