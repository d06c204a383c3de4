"""Reports: one page about a training, its plan, its steps and its decisions, in a file that needs no network."""
