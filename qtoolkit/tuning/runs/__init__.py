"""Run a model on the user's batches: as a whole, or section by section."""
