"""The host path: C programs, the compiler, the cache of what it made, and the threads that run it."""
