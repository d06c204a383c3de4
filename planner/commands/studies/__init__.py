"""Results of commands, as data."""
