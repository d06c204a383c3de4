"""The words of decisions, for logs and reports."""
