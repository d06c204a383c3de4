"""The engine: runs messages on lanes, counts steps, keeps residuals."""
