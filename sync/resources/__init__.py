"""The resources of a rank: lanes, communicators, memories, residuals."""
