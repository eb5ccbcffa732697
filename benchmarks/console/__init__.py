"""The console with many devices: frame times, bytes a second, and its pictures for the documentation."""
