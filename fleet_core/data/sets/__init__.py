"""The named data sets: what there is, where it is fetched from, how it is checked, and the readers of the originals."""
