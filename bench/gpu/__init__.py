"""Make targets for a machine with a GPU; every part of a target has a time budget."""
