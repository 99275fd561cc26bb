"""Code that plants the catalogue's faults: each builds both sides of one row."""
