"""Results of commands, as texts and pictures."""
