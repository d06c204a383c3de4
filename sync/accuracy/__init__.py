"""Rules of accuracy, and the errors of compressors by which they judge. Pure: no process groups, no clock."""
