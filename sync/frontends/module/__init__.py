"""The front end of bare modules."""
