"""Versions of weights in a store: a publisher writes them, followers read them."""
