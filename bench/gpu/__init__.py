"""Parts of the targets for a machine with a GPU, each with a budget of time; the card as a clock; checks."""
