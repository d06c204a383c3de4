"""The host path: compiling C programs, caching the libraries, calling them, and the threads that they run on."""
