"""What other packages need of qtoolkit: each module here is for one of them, and imports it."""
