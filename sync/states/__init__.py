"""Saved states: what ranks remember, how it is checked, and how it is dealt to another number of ranks."""
