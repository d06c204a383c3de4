"""The attachment of a model: its front end, its plan, its figures and its tuning, put together."""
