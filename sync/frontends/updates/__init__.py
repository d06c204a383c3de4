"""The front end of models whose updates are averaged, in place of gradients."""
