"""The named data sets: the registry, downloads, the cache, and the readers of the original files."""
