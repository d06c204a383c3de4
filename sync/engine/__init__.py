"""The engine: runs messages on lanes, counts training steps, keeps residuals, saves and loads states."""
